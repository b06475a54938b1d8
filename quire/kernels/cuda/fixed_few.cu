// Up to ROWS rows times a weight, with the bits of deterministic mode's kernels, on Hopper: norm(x) W^T, or the gate of
// it; or x W^T summed in slices, and a residual. Bias too.
//
// A warp owns eight output features (with a gate: eight gates and their ups) and all columns of a sum, or one slice of
// it. It asks the copy engine for all its weights at once, before the kernel before has ended, and multiplies them in
// the order of k, 16 columns at a time: no ring, no other warp's sums before the slices' tree.
//
// **The norm** is computed by every thread block, in the order of `norm._rms_norm_kernel`: squares of neighbours first.
//
// **Roundings** are those of kernels one by one: the norm's rows, a GEMM's result before its gate or before a residual is
// added.
//
// Compiled at run time (fixed_few.py). Defined in front of this file: ROWS, WIDTH, SLICES, TILES (tiles of a thread block
// where there are no slices), NORM (bytes of a number of its gain, 0: none), GATED, BIAS, RESIDUAL, EARLY (started while
// the previous kernel runs), WATCHED, THREADS. rounding.cu and fixed_few_parts.cu come before it.

constexpr int TILE = 8, SEGMENT = 256;  // features of a warp; columns that a warp norms, or waits for, at once
constexpr int LINES = GATED ? 2 * TILE : TILE;  // rows of the weight that a warp multiplies with
constexpr int LENGTH = WIDTH / SLICES;
constexpr int CHUNKS = (LENGTH + SEGMENT - 1) / SEGMENT;
constexpr int LINE_BYTES = 2 * LENGTH + 16;  // an odd multiple of 16: eight lines lie in different banks
constexpr int UNITS = SLICES > 1 ? SLICES : TILES, WARPS = THREADS / 32;
constexpr int X_PLACE = UNITS * LINES * LINE_BYTES;
constexpr int SUMS_PLACE = X_PLACE + SLICES * ROWS * LINE_BYTES;
constexpr int NUM_SUMS = SLICES > 1 ? SLICES * ROWS * TILE : ROWS * CHUNKS;
constexpr int BARRIERS_PLACE = SUMS_PLACE + (4 * NUM_SUMS + 7) / 8 * 8;
static_assert(WIDTH % (32 * SLICES) == 0 && UNITS <= WARPS && ROWS * TILE <= 64, "no such GEMM");
static_assert(SLICES > 1 ? !NORM && !GATED : NORM && !RESIDUAL, "a norm goes with whole sums, a residual with slices");

typedef unsigned short u16;

struct Shared {
    unsigned char* memory;
    u32 place;

    __device__ __forceinline__ u32 weights(int unit) const { return place + unit * LINES * LINE_BYTES; }
    __device__ __forceinline__ u32 x(int slice) const { return place + X_PLACE + slice * ROWS * LINE_BYTES; }
    __device__ __forceinline__ u32 barrier(int unit, int chunk) const {
        return place + BARRIERS_PLACE + 8 * (unit * CHUNKS + chunk);
    }
    __device__ __forceinline__ float* sums() const { return (float*)(memory + SUMS_PLACE); }
    __device__ __forceinline__ void keep(int slice, int row, int column, uint4 values) const {
        *(uint4*)(memory + X_PLACE + (slice * ROWS + row) * LINE_BYTES + 2 * column) = values;
    }
};

// Of FIRST and those behind it, COUNT in all (a power of two): neighbours first. Beyond the last there are zeros.
template <int FIRST, int COUNT>
__device__ __forceinline__ float neighbours_first(const float* sums) {
    if constexpr (FIRST >= CHUNKS)
        return 0.0f;
    else if constexpr (COUNT == 1)
        return sums[FIRST];
    else
        return neighbours_first<FIRST, COUNT / 2>(sums) + neighbours_first<FIRST + COUNT / 2, COUNT / 2>(sums);
}

__device__ constexpr int power_from(int count) {
    int power = 1;
    while (power < count) power *= 2;
    return power;
}

// The tree of `quire.kernels.slices`: its left half has the largest power of two smaller than COUNT.
template <int FIRST, int COUNT>
__device__ __forceinline__ float in_tree(const float* sums) {
    if constexpr (COUNT == 1) {
        return sums[FIRST * ROWS * TILE];
    } else {
        constexpr int LEFT = power_from(COUNT) / 2;
        return in_tree<FIRST, LEFT>(sums) + in_tree<FIRST + LEFT, COUNT - LEFT>(sums);
    }
}

// ---- weights

__device__ __forceinline__ void ask_for_weights(const Shared& shared, int unit, int slice, int tile, int features,
                                                const u16* weight) {
    int lane = threadIdx.x % 32;
    if (lane == 0) {
        for (int chunk = 0; chunk < CHUNKS; ++chunk) init_barrier(shared.barrier(unit, chunk));
        show_barriers();
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
            expect_bytes(shared.barrier(unit, chunk), 2 * LINES * min(SEGMENT, LENGTH - chunk * SEGMENT));
    }
    __syncwarp();
    for (int piece = lane; piece < LINES * CHUNKS; piece += 32) {
        int chunk = piece / LINES, line = piece % LINES, column = chunk * SEGMENT;
        long long row = tile * TILE + line % TILE + line / TILE * features;
        copy_weights(shared.weights(unit) + line * LINE_BYTES + 2 * column,
                     weight + row * WIDTH + slice * LENGTH + column, 2 * min(SEGMENT, LENGTH - column),
                     shared.barrier(unit, chunk));
    }
}

// ---- rows

__device__ __forceinline__ void spread(float (&to)[8], uint4 from) {
    to[0] = low_of(from.x), to[1] = high_of(from.x), to[2] = low_of(from.y), to[3] = high_of(from.y);
    to[4] = low_of(from.z), to[5] = high_of(from.z), to[6] = low_of(from.w), to[7] = high_of(from.w);
}

__device__ __forceinline__ void load_gain(float (&to)[8], const void* gain, int column) {
    if (NORM == 2) {
        spread(to, *(const uint4*)((const u16*)gain + column));
    } else {
        const float4* from = (const float4*)((const float*)gain + column);
        float4 low = from[0], high = from[1];
        to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
        to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
    }
}

// The sum of a warp's squares, neighbours first; squares of bf16 numbers are exact.
__device__ __forceinline__ float sum_of_squares(const float (&values)[8]) {
    float sums[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = values[i] * values[i];
    float sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    return sum;
}

// All rows through the norm, to where ldmatrix reads them. A warp has a segment of a row at a time.
__device__ __forceinline__ void norm_rows(const Shared& shared, const u16* x, const void* gain, float eps,
                                          int num_rows) {
    constexpr int TURNS = (ROWS * CHUNKS + WARPS - 1) / WARPS;
    uint4 held[TURNS];
    float gains[TURNS][8];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        int column = (warp + turn * WARPS) % CHUNKS * SEGMENT + lane * 8;
        if (column < WIDTH) load_gain(gains[turn], gain, column);
    }
    wait_for_previous_kernel();
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        int row = (warp + turn * WARPS) / CHUNKS, column = (warp + turn * WARPS) % CHUNKS * SEGMENT + lane * 8;
        held[turn] = make_uint4(0, 0, 0, 0);
        if (row < num_rows && column < WIDTH) held[turn] = *(const uint4*)(x + row * WIDTH + column);
    }
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        float values[8];
        spread(values, held[turn]);
        float sum = sum_of_squares(values);
        if (lane == 0 && warp + turn * WARPS < ROWS * CHUNKS) shared.sums()[warp + turn * WARPS] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        int row = (warp + turn * WARPS) / CHUNKS, column = (warp + turn * WARPS) % CHUNKS * SEGMENT + lane * 8;
        if (row >= num_rows || column >= WIDTH) continue;
        float total = neighbours_first<0, power_from(CHUNKS)>(shared.sums() + row * CHUNKS);
        float scale = inverse_root(__fmaf_rn(total, (float)(1.0 / WIDTH), eps)), values[8];
        spread(values, held[turn]);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = __fmul_rn(__fmul_rn(values[i], scale), gains[turn][i]);
        shared.keep(0, row, column, make_uint4(packed(values[0], values[1]), packed(values[2], values[3]),
                                               packed(values[4], values[5]), packed(values[6], values[7])));
    }
    __syncthreads();
}

// A warp's slice of all rows.
__device__ __forceinline__ void load_slice(const Shared& shared, const u16* x, int slice, int num_rows) {
    constexpr int VECTORS = LENGTH / 8;
    for (int each = threadIdx.x % 32; each < num_rows * VECTORS; each += 32) {
        int row = each / VECTORS, column = each % VECTORS * 8;
        shared.keep(slice, row, column, *(const uint4*)(x + row * WIDTH + slice * LENGTH + column));
    }
    __syncwarp();
}

// ---- products

template <int COLUMNS>
__device__ __forceinline__ void multiply_chunk(float (&sums)[LINES / TILE][4], u32 x, u32 weights) {
#pragma unroll
    for (int column = 0; column < COLUMNS; column += 32) {
        u32 rows[4], features[4];
        load_matrices(rows, x + 2 * column);
#pragma unroll
        for (int half = 0; half < LINES / TILE; ++half) {
            load_matrices(features, weights + half * TILE * LINE_BYTES + 2 * column);
            multiply(sums[half], rows[0], rows[1], features[0], features[1]);
            multiply(sums[half], rows[2], rows[3], features[2], features[3]);
        }
    }
}

// Lane l has row l / 4, features 2 (l % 4) and the next. Rows that are not there are copies of the last one.
__device__ __forceinline__ void multiply_all(float (&sums)[LINES / TILE][4], const Shared& shared, int unit, int slice,
                                             int num_rows) {
    int line = threadIdx.x % 8, behind = threadIdx.x % 32 / 8 * 16;
    u32 x = shared.x(slice) + min(line, num_rows - 1) * LINE_BYTES + behind;
    u32 weights = shared.weights(unit) + line * LINE_BYTES + behind;
#pragma unroll
    for (int half = 0; half < LINES / TILE; ++half) sums[half][0] = sums[half][1] = sums[half][2] = sums[half][3] = 0.0f;
    constexpr int WHOLE = LENGTH / SEGMENT;
    for (int chunk = 0; chunk < WHOLE; ++chunk) {
        wait_for(shared.barrier(unit, chunk));
        multiply_chunk<SEGMENT>(sums, x + 2 * chunk * SEGMENT, weights + 2 * chunk * SEGMENT);
    }
    if constexpr (LENGTH % SEGMENT != 0) {
        wait_for(shared.barrier(unit, WHOLE));
        multiply_chunk<LENGTH % SEGMENT>(sums, x + 2 * WHOLE * SEGMENT, weights + 2 * WHOLE * SEGMENT);
    }
}

// ---- results

__device__ __forceinline__ float number_of(u16 value) { return low_of(value); }

__device__ __forceinline__ float with_bias(float sum, const u16* bias, int feature) {
    return BIAS ? sum + number_of(bias[feature]) : sum;
}

__device__ __forceinline__ void store_tile(const float (&sums)[LINES / TILE][4], int tile, const u16* bias, u16* out,
                                           int num_rows, int features) {
    int row = threadIdx.x % 32 / 4, feature = tile * TILE + threadIdx.x % 4 * 2;
    if (row >= num_rows) return;
    float found[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        found[i] = with_bias(sums[0][i], bias, feature + i);
        if (GATED) found[i] = rounded_gate(found[i], with_bias(sums[LINES / TILE - 1][i], bias, features + feature + i));
    }
    *(u32*)(out + row * features + feature) = packed(found[0], found[1]);
}

__device__ __forceinline__ void store_slices(const float (&sums)[LINES / TILE][4], const Shared& shared, int slice,
                                             const u16* bias, float residual, u16* out, int num_rows, int features) {
    int row = threadIdx.x % 32 / 4, place = (slice * ROWS + row) * TILE + threadIdx.x % 4 * 2;
    if (row < num_rows) shared.sums()[place] = sums[0][0], shared.sums()[place + 1] = sums[0][1];
    __syncthreads();
    if (threadIdx.x >= num_rows * TILE) return;
    int feature = blockIdx.x * TILE + threadIdx.x % TILE;
    float found = with_bias(in_tree<0, SLICES>(shared.sums() + threadIdx.x), bias, feature);
    if (RESIDUAL) found = rounded(found) + residual;
    out[threadIdx.x / TILE * features + feature] = (u16)packed(found, 0.0f);
}

// `features` are those of the output: with a gate half of the weight's rows.
extern "C" __global__ void __launch_bounds__(THREADS)
    fixed_few(const u16* x, const u16* weight, const void* gain, const u16* bias, const u16* residual, u16* out,
             float eps, int num_rows, int features) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared shared{memory, shared_address(memory)};
    int unit = threadIdx.x / 32, slice = SLICES > 1 ? unit : 0;
    int tile = SLICES > 1 ? blockIdx.x : blockIdx.x * TILES + unit;
    bool works = unit < UNITS && tile * TILE < features;
    float sums[LINES / TILE][4];
    if (works) ask_for_weights(shared, unit, slice, tile, features, weight);
    let_next_kernel_start();
    if constexpr (SLICES > 1) {
        wait_for_previous_kernel();
        int row = threadIdx.x / TILE;
        float added = 0.0f;
        if (RESIDUAL && row < num_rows)
            added = number_of(residual[row * features + blockIdx.x * TILE + threadIdx.x % TILE]);
        load_slice(shared, x, slice, num_rows);
        multiply_all(sums, shared, unit, slice, num_rows);
        store_slices(sums, shared, slice, bias, added, out, num_rows, features);
    } else {
        norm_rows(shared, x, gain, eps, num_rows);
        if (!works) return;
        multiply_all(sums, shared, unit, 0, num_rows);
        store_tile(sums, tile, bias, out, num_rows, features);
    }
}
