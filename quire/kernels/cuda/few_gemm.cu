// out = norm(x) W^T (+ residual), or silu(first half) * second half of it, for up to eight rows on Hopper.
//
// At so few rows a GEMM is its weight's way from memory. A thread block holds the rows, or its PART of their columns, in
// the registers of eight warps, as the tensor cores want them, and lets sixteen features after another come by: a tile. A
// ninth warp copies weights into a ring of shared memory, the first before the previous kernel has ended, and a tenth
// adds up what the eight have of a tile and stores it, so that nobody who multiplies waits for memory. Ring and registers leave
// room for a second block: the next kernel fills its ring while this one ends.
//
// The norm's gain is a factor of the rows, its scale one of the sums. Parts of a tile meet in memory (`partial`): the
// block that comes last adds them, in their order.
//
// Compiled at run time (few_gemm.py). Defined in front of this file: STEPS (of 32 columns, of a warp), CHUNK_STEPS (of
// them at a time: a stage of the ring), STAGES, PARTS, BLOCKS (that a multiprocessor has room for), NORM, GATED,
// RESIDUAL, EARLY, LATE (the next kernel may start when the last weights are asked for, not at once), WATCHED.

constexpr int WARPS = 8, LOADING = 8, FINISHING = 9, THREADS = 320;
constexpr int ROWS = 8, TILE = 16;  // what an instruction multiplies: so many rows and features
constexpr int PADDED = 20;  // floats of a row of sums: rows lie in different banks
constexpr int SLOTS = PARTS > 1 ? 2 : 1;  // tiles whose sums wait to be added up: parts may wait for memory there
constexpr int CHUNKS = STEPS / CHUNK_STEPS;
constexpr int WARP_COLUMNS = 32 * CHUNK_STEPS;
constexpr int CHUNK_COLUMNS = WARPS * WARP_COLUMNS;
constexpr int COLUMNS = CHUNKS * CHUNK_COLUMNS;
constexpr int CHUNK_BYTES = 2 * CHUNK_COLUMNS;
constexpr int LINE = CHUNK_BYTES + 16;  // of a feature: eight lie in different banks
constexpr int STAGE_BYTES = TILE * LINE;
constexpr int OUT_TILE = GATED ? TILE / 2 : TILE;

static_assert(STEPS % CHUNK_STEPS == 0, "no whole chunks");
static_assert(PARTS == 1 || (!NORM && !GATED), "a part of the columns knows neither the norm nor the gate");

struct Memory {
    u64 full[STAGES];  // the bytes of a stage have arrived
    u64 free[STAGES];  // every warp has read a stage
    u64 ready[SLOTS];  // every warp has left its sums
    u64 taken[SLOTS];
    float squares[WARPS][ROWS];
    alignas(16) float sums[SLOTS][WARPS][ROWS * PADDED];
    uint4 gains[NORM ? COLUMNS / 8 : 1];
};

struct Numbers {
    const u16 *weight, *x, *gain, *residual;
    u16* out;
    float4* partial;
    int* arrived;
    float eps;
    int rows, features, width;  // features of the output
};

// Which tiles a block has, and which part of the columns.
struct Share {
    int part = blockIdx.x % PARTS, first = blockIdx.x / PARTS, every = gridDim.x / PARTS, tiles;

    __device__ __forceinline__ Share(int features) : tiles(features / OUT_TILE) {}
};

// ---- the warp that copies weights

struct Loader {
    const Numbers& numbers;
    Memory& memory;
    Share share;
    u32 ring;
    int lane, tile, chunk = 0, done = 0;
    u64 policy = read_once_policy();

    __device__ __forceinline__ Loader(const Numbers& numbers, Memory& memory, u32 ring)
        : numbers(numbers), memory(memory), share(numbers.features), ring(ring), lane(threadIdx.x % 32) {
        tile = share.first;
    }

    __device__ __forceinline__ bool has_more() const { return tile < share.tiles; }

    __device__ __forceinline__ int feature() const {
        int mine = tile * OUT_TILE + lane % OUT_TILE;
        return lane < OUT_TILE ? mine : numbers.features + mine;  // an up
    }

    // One chunk of each of the tile's features.
    __device__ __forceinline__ void load() {
        int stage = done % STAGES;
        if (lane == 0) expect_bytes(&memory.full[stage], TILE * CHUNK_BYTES);
        __syncwarp();
        if (lane < TILE) {
            const u16* from = numbers.weight + (long long)feature() * numbers.width + share.part * COLUMNS +
                              chunk * CHUNK_COLUMNS;
            copy_bytes(ring + stage * STAGE_BYTES + lane * LINE, from, CHUNK_BYTES, &memory.full[stage], policy);
        }
        ++done;
        if (++chunk == CHUNKS) {
            chunk = 0;
            tile += share.every;
        }
    }

    __device__ __forceinline__ void begin() {
        if (lane == 0) {
            for (int stage = 0; stage < STAGES; ++stage) {
                init_barrier(&memory.full[stage], 1);
                init_barrier(&memory.free[stage], WARPS);
            }
            for (int slot = 0; slot < SLOTS; ++slot) {
                init_barrier(&memory.ready[slot], WARPS);
                init_barrier(&memory.taken[slot], 1);
            }
            publish_barriers();
        }
        __syncwarp();
        while (done < STAGES && has_more()) load();
    }

    __device__ __forceinline__ void run() {
        while (has_more()) {
            wait_for(&memory.free[done % STAGES], done / STAGES - 1 & 1);
            load();
        }
        if (LATE) launch_next_kernel();
    }
};

// ---- the warps that multiply

// Two numbers times their gains, and their squares.
__device__ __forceinline__ u32 normed(u32 word, u32 gain, float& square) {
    float low = low_of(word), high = high_of(word);
    square += low * low + high * high;
    return packed(low * low_of(gain), high * high_of(gain));
}

// They do not depend on the previous kernel.
__device__ __forceinline__ void load_gains(const Numbers& numbers, Memory& memory) {
#pragma unroll 1
    for (int place = threadIdx.x; place < COLUMNS / 8; place += 32 * WARPS)
        memory.gains[place] = load_words(numbers.gain + 8 * place);
}

struct Multiplier {
    const Numbers& numbers;
    Memory& memory;
    Share share;
    u32 ring;
    int warp, lane;
    u32 rows[STEPS][4];  // of one row 32 columns a step: four lanes have two of every eight columns

    __device__ __forceinline__ Multiplier(const Numbers& numbers, Memory& memory, u32 ring)
        : numbers(numbers), memory(memory), share(numbers.features), ring(ring), warp(threadIdx.x / 32),
          lane(threadIdx.x % 32) {}

    __device__ __forceinline__ int column(int step) const {
        return step / CHUNK_STEPS * CHUNK_COLUMNS + warp * WARP_COLUMNS + step % CHUNK_STEPS * 32 + lane % 4 * 8;
    }

    __device__ __forceinline__ void load_rows() {
        int row = lane / 4;
        const u16* from = numbers.x + (long long)row * numbers.width + share.part * COLUMNS;
        bool real = row < numbers.rows;
        float square = 0.0f;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            uint4 words = load_words(from + column(step), real);
            rows[step][0] = words.x, rows[step][1] = words.y, rows[step][2] = words.z, rows[step][3] = words.w;
        }
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (NORM) {
                uint4 gain = memory.gains[column(step) / 8];
                rows[step][0] = normed(rows[step][0], gain.x, square);
                rows[step][1] = normed(rows[step][1], gain.y, square);
                rows[step][2] = normed(rows[step][2], gain.z, square);
                rows[step][3] = normed(rows[step][3], gain.w, square);
            }
            exchange(rows[step]);
        }
        if (!NORM) return;
        square += __shfl_xor_sync(~0u, square, 1);
        square += __shfl_xor_sync(~0u, square, 2);
        if (lane % 4 == 0) memory.squares[warp][row] = square;
    }

    __device__ __forceinline__ void run() {
        wait_for_previous_kernel();
        load_rows();
        // Lanes name the rows of four matrices of 8 x 8: features, the eight others, and both of the next columns.
        u32 mine = ring + lane % 16 * LINE + 2 * warp * WARP_COLUMNS + lane / 16 * 16;
        int stage = 0, number = 0;
        u32 phase = 0;
        for (int tile = share.first; tile < share.tiles; tile += share.every, ++number) {
            float sums[4] = {0, 0, 0, 0}, others[4] = {0, 0, 0, 0};
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                wait_for(&memory.full[stage], phase);
#pragma unroll
                for (int step = 0; step < CHUNK_STEPS; ++step) {
                    const u32(&row)[4] = rows[chunk * CHUNK_STEPS + step];
                    multiply(sums, read_weights(mine + stage * STAGE_BYTES + 64 * step), row[0], row[1]);
                    multiply(others, read_weights(mine + stage * STAGE_BYTES + 64 * step + 32), row[2], row[3]);
                }
                __syncwarp();
                arrive(&memory.free[stage], lane == 0);
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            int slot = number % SLOTS;
            wait_for(&memory.taken[slot], number / SLOTS - 1 & 1);  // at once for the first tiles
            float* left = memory.sums[slot][warp] + lane % 4 * 2 * PADDED + lane / 4;
#pragma unroll
            for (int i = 0; i < 4; ++i) left[i % 2 * PADDED + i / 2 * 8] = sums[i] + others[i];
            __syncwarp();
            arrive(&memory.ready[slot], lane == 0);
        }
    }
};

// ---- the warp that finishes tiles: a lane has four features of a row, or two gates and their ups

__device__ __forceinline__ float4 sum(float4 one, float4 other) {
    return make_float4(one.x + other.x, one.y + other.y, one.z + other.z, one.w + other.w);
}

struct Finisher {
    const Numbers& numbers;
    Memory& memory;
    Share share;
    int lane, row;

    __device__ __forceinline__ Finisher(const Numbers& numbers, Memory& memory)
        : numbers(numbers), memory(memory), share(numbers.features), lane(threadIdx.x % 32), row(lane / 4) {}

    __device__ __forceinline__ float4 read(int slot, int warp) const {
        const float* left = memory.sums[slot][warp] + row * PADDED;
        if (!GATED) return *(const float4*)(left + lane % 4 * 4);
        float2 gate = *(const float2*)(left + lane % 4 * 2), up = *(const float2*)(left + 8 + lane % 4 * 2);
        return make_float4(gate.x, gate.y, up.x, up.y);
    }

    __device__ __forceinline__ float4 added(int slot) const {
        float4 total = read(slot, 0);
#pragma unroll
        for (int warp = 1; warp < WARPS; ++warp) total = sum(total, read(slot, warp));
        return total;
    }

    __device__ __forceinline__ float scale() const {
        float square = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) square += memory.squares[warp][row];
        return rsqrtf(square / COLUMNS + numbers.eps);
    }

    // Whether this is the last part of the tile to come; then `total` is the sum of all.
    __device__ __forceinline__ bool joins(float4& total, int tile) const {
        float4* parts = numbers.partial + (long long)tile * PARTS * 32 + lane;
        parts[share.part * 32] = total;
        __threadfence();
        __syncwarp();
        int before = 0;
        if (lane == 0) before = atomicAdd(numbers.arrived + tile, 1);
        if (__shfl_sync(~0u, before, 0) != PARTS - 1) return false;
        __threadfence();
        if (lane == 0) numbers.arrived[tile] = 0;
        total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) total = sum(total, __ldcg(parts + part * 32));
        return true;
    }

    __device__ __forceinline__ long long place(int tile) const {
        return (long long)row * numbers.features + tile * OUT_TILE + lane % 4 * (OUT_TILE / 4);
    }

    __device__ __forceinline__ void store(float4 total, int tile, uint2 residual) const {
        if (row >= numbers.rows) return;
        if (GATED) {
            float first = total.x / (1.0f + __expf(-total.x)) * total.z;
            float second = total.y / (1.0f + __expf(-total.y)) * total.w;
            *(u32*)(numbers.out + place(tile)) = packed(first, second);
            return;
        }
        if (RESIDUAL)
            total = sum(total, make_float4(low_of(residual.x), high_of(residual.x), low_of(residual.y),
                                           high_of(residual.y)));
        *(uint2*)(numbers.out + place(tile)) = make_uint2(packed(total.x, total.y), packed(total.z, total.w));
    }

    __device__ __forceinline__ void run() {
        wait_for_previous_kernel();
        float factor = 1.0f;
        int number = 0;
        for (int tile = share.first; tile < share.tiles; tile += share.every, ++number) {
            uint2 residual = make_uint2(0, 0);
            if (RESIDUAL && row < numbers.rows) residual = __ldcg((const uint2*)(numbers.residual + place(tile)));
            int slot = number % SLOTS;
            wait_for(&memory.ready[slot], number / SLOTS & 1);
            float4 total = added(slot);
            if (NORM && number == 0) factor = scale();
            __syncwarp();
            arrive(&memory.taken[slot], lane == 0);
            if (NORM) total = make_float4(total.x * factor, total.y * factor, total.z * factor, total.w * factor);
            if (PARTS > 1 && !joins(total, tile)) continue;
            store(total, tile, residual);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    few_gemm(const u16* weight, const u16* x, const u16* gain, const u16* residual, u16* out, float4* partial,
             int* arrived, float eps, int rows, int features, int width) {
    extern __shared__ uint4 dynamic[];
    __shared__ Memory memory;
    Numbers numbers{weight, x, gain, residual, out, partial, arrived, eps, rows, features, width};
    u32 ring = shared_address(dynamic);
    int warp = threadIdx.x / 32;
    Loader loader(numbers, memory, ring);
    if (warp == LOADING)
        loader.begin();
    else if (NORM && warp < WARPS)
        load_gains(numbers, memory);
    __syncthreads();
    if (!LATE) launch_next_kernel();
    if (warp == LOADING)
        loader.run();
    else if (warp == FINISHING)
        Finisher(numbers, memory).run();
    else
        Multiplier(numbers, memory, ring).run();
}
