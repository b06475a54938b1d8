// out = norm(x) W^T (+ residual), or silu(first half) * second half of it, for up to eight rows on Hopper.
//
// At so few rows a GEMM is its weight's way from memory. Weights go straight into registers, 16 bytes a load, the first
// of them before the previous kernel has ended, and lie there as the tensor cores want them; nothing goes through
// shared memory before the final sum. Blocks are small, come and go, and leave room for those of the next kernel.
//
// An instruction multiplies 16 rows by 8 features, 16 columns deep. Which columns these are is free, as long as both
// sides agree. Here the eight features are four, each with 32 columns in two places, and the sixteen rows are eight,
// likewise: half of the products are of columns that do not belong together, and nobody reads them. But so eight lanes
// load 128 neighbouring bytes of a feature, a line of the cache, and not 64 of two features (as `linear_stream` does).
//
// A block has 4 * QUADS features (half of them gates, half their ups), a warp of it a part of the columns. The norm's
// gain is a factor of the rows, its scale one of the sums.
//
// Compiled at run time (few_gemm.py). Defined in front of this file: QUADS, WARPS, AHEAD (lines of 64 columns that are
// on their way to a warp), LINES (of a warp), BLOCKS (that a multiprocessor has room for), NORM, GATED, RESIDUAL,
// EARLY.

constexpr int ROWS = 8, LINE = 64, EVERY = WARPS * LINE;  // neighbouring lines are of neighbouring warps
constexpr int WIDTH = LINES * EVERY;
constexpr int OUTPUTS = GATED ? 2 * QUADS : 4 * QUADS, HALF = OUTPUTS / 4;
constexpr int PADDED = 4 * QUADS + 4;  // floats of a row of sums: rows lie in different banks

static_assert(LINES % AHEAD == 0, "no whole turns");
static_assert(!GATED || QUADS % 2 == 0, "a gate without its up");

struct Memory {
    float squares[WARPS][ROWS];
    float sums[WARPS][ROWS * PADDED];
};

// Two numbers times their gains, and their squares.
__device__ __forceinline__ u32 normed(u32 word, u32 gain, float& square) {
    square += low_of(word) * low_of(word);
    square += high_of(word) * high_of(word);
    return multiply_pair(word, gain);
}

__device__ __forceinline__ uint4 normed(uint4 words, uint4 gains, float& square) {
    words.x = normed(words.x, gains.x, square), words.y = normed(words.y, gains.y, square);
    words.z = normed(words.z, gains.z, square), words.w = normed(words.w, gains.w, square);
    return words;
}

// A warp's part of the columns.
struct Multiplier {
    const u16 *first, *second, *row, *gain;  // of this lane: features, their ups, a row, and its columns' gains
    bool real;
    u64 policy = read_once_policy();
    uint4 ahead[AHEAD][QUADS];
    float sums[QUADS][4] = {}, square = 0.0f;

    __device__ __forceinline__ Multiplier(const u16* weight, const u16* x, const u16* gains, int rows, int features) {
        int lane = threadIdx.x % 32, start = threadIdx.x / 32 * LINE;
        first = weight + (long long)(blockIdx.x * OUTPUTS + lane / 8) * WIDTH + start + lane % 8 * 8;
        second = first + (long long)features * WIDTH;
        row = x + lane / 4 * WIDTH + start + lane % 4 * 8;
        gain = gains + start + lane % 4 * 8;
        real = lane / 4 < rows;
    }

    __device__ __forceinline__ void load(int slot, int line) {
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) {
            const u16* from = quad < HALF ? first : second;
            ahead[slot][quad] = load_once(from + quad % HALF * 4 * WIDTH + line * EVERY, policy);
        }
    }

    __device__ __forceinline__ uint4 load_columns(int place) {
        uint4 words = load_row(row + place, real);
        return NORM ? normed(words, __ldg((const uint4*)(gain + place)), square) : words;
    }

    __device__ __forceinline__ void multiply_line(int slot, int line) {
        uint4 one = load_columns(line * EVERY), two = load_columns(line * EVERY + LINE / 2);
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) {
            uint4 weights = ahead[slot][quad];
            multiply(sums[quad], one.x, two.x, one.y, two.y, weights.x, weights.y);
            multiply(sums[quad], one.z, two.z, one.w, two.w, weights.z, weights.w);
        }
    }

    // Turns are not unrolled, and lines of a turn meet: else the compiler puts loads off until they are needed.
    __device__ __forceinline__ void run() {
#pragma unroll
        for (int line = 0; line < AHEAD; ++line) load(line, line);
        wait_for_previous_kernel();
#pragma unroll 1
        for (int start = 0; start < LINES - AHEAD; start += AHEAD) {
#pragma unroll
            for (int slot = 0; slot < AHEAD; ++slot) {
                multiply_line(slot, start + slot);
                load(slot, start + slot + AHEAD);
                __syncwarp();
            }
        }
#pragma unroll
        for (int slot = 0; slot < AHEAD; ++slot) multiply_line(slot, LINES - AHEAD + slot);
    }

    // The first rows' products with the features' first place, the others' with their second.
    __device__ __forceinline__ void leave(Memory& memory) {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (NORM) {
            square += __shfl_xor_sync(~0u, square, 1);
            square += __shfl_xor_sync(~0u, square, 2);
            if (lane % 4 == 0) memory.squares[warp][lane / 4] = square;
        }
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad)
            memory.sums[warp][lane / 4 * PADDED + 4 * quad + lane % 4] = sums[quad][0] + sums[quad][3];
    }
};

__device__ __forceinline__ float added(const Memory& memory, int row, int feature) {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += memory.sums[warp][row * PADDED + feature];
    return total;
}

__device__ __forceinline__ float scale_of(const Memory& memory, int row, float eps) {
    float square = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) square += memory.squares[warp][row];
    return rsqrtf(square / WIDTH + eps);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    few_gemm(const u16* weight, const u16* x, const u16* gain, const u16* residual, u16* out, float eps, int rows,
             int features) {
    __shared__ Memory memory;
    launch_next_kernel();
    Multiplier multiplier(weight, x, gain, rows, features);
    multiplier.run();
    multiplier.leave(memory);
    __syncthreads();
    for (int place = threadIdx.x; place < rows * OUTPUTS; place += 32 * WARPS) {
        int row = place / OUTPUTS, feature = place % OUTPUTS;
        long long target = (long long)row * features + blockIdx.x * OUTPUTS + feature;
        float scale = NORM ? scale_of(memory, row, eps) : 1.0f;
        float total = added(memory, row, feature) * scale;
        if (GATED) total = total / (1.0f + __expf(-total)) * (added(memory, row, feature + OUTPUTS) * scale);
        if (RESIDUAL) total += low_of(residual[target]);
        out[target] = (u16)packed(total, total);
    }
}
