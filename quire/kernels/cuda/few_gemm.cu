// out = norm(x) W^T (+ residual), or silu(first half) * second half of it, for up to eight rows on Hopper.
//
// At so few rows a GEMM is its weight's way from memory. Weights go straight into registers, 16 bytes a load, the first
// of them before the previous kernel has ended, and lie there as the tensor cores want them: which columns an
// instruction multiplies is free, as long as weights and rows agree. So a lane loads eight neighbouring columns of
// feature lane / 4 and of row lane / 4, and nothing goes through shared memory before the final sum. Blocks are small,
// come and go, and leave room for those of the next kernel.
//
// A block has 16 * TILES features, a warp of it a part of the columns. The norm's gain is a factor of the rows, its
// scale one of the sums.
//
// Compiled at run time (few_gemm.py). Defined in front of this file: TILES, WARPS, AHEAD (lines of 64 columns that are
// on their way to a lane), LINES (of a warp), BLOCKS (that a multiprocessor has room for), NORM, GATED, RESIDUAL, EARLY.

constexpr int ROWS = 8, TILE = 16;  // what an instruction multiplies: so many rows and features
constexpr int PADDED = 20;  // floats of a row of sums: rows lie in different banks
constexpr int LINE = 64, EVERY = WARPS * LINE;  // neighbouring lines are of neighbouring warps: memory likes that
constexpr int WIDTH = LINES * EVERY;
static_assert(LINES % AHEAD == 0, "no whole turns");
constexpr int OUT_TILE = GATED ? TILE / 2 : TILE;

struct Memory {
    float squares[WARPS][ROWS];
    float sums[WARPS][TILES][ROWS * PADDED];
};

// 64 columns of two features of a tile: eight here, those 32 further there.
struct Line {
    uint4 first[2], second[2];
};

__device__ __forceinline__ Line load_line(const u16* first, const u16* second, u64 policy) {
    Line line;
    line.first[0] = load_once(first, policy), line.first[1] = load_once(first + LINE / 2, policy);
    line.second[0] = load_once(second, policy), line.second[1] = load_once(second + LINE / 2, policy);
    return line;
}

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
    const u16 *first, *second, *row, *gain;  // of this lane: two features, a row, and its columns' gains
    bool real;
    u64 policy = read_once_policy();
    Line ahead[AHEAD][TILES];
    float sums[TILES][4] = {}, square = 0.0f;

    __device__ __forceinline__ Multiplier(const u16* weight, const u16* x, const u16* gains, int rows, int features) {
        int lane = threadIdx.x % 32, mine = lane / 4, column = threadIdx.x / 32 * LINE + lane % 4 * 8;
        first = weight + (long long)(blockIdx.x * TILES * OUT_TILE + mine) * WIDTH + column;
        second = first + (long long)(GATED ? features : TILE / 2) * WIDTH;
        row = x + mine * WIDTH + column;
        gain = gains + column;
        real = mine < rows;
    }

    __device__ __forceinline__ void load(int slot, int line) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            int place = tile * OUT_TILE * WIDTH + line * EVERY;
            ahead[slot][tile] = load_line(first + place, second + place, policy);
        }
    }

    __device__ __forceinline__ void multiply_line(int slot, int line) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int place = line * EVERY + half * (LINE / 2);
            uint4 words = load_row(row + place, real);
            if (NORM) words = normed(words, __ldg((const uint4*)(gain + place)), square);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                uint4 one = ahead[slot][tile].first[half], two = ahead[slot][tile].second[half];
                multiply(sums[tile], one.x, two.x, one.y, two.y, words.x, words.y);
                multiply(sums[tile], one.z, two.z, one.w, two.w, words.z, words.w);
            }
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

    __device__ __forceinline__ void leave(Memory& memory) {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (NORM) {
            square += __shfl_xor_sync(~0u, square, 1);
            square += __shfl_xor_sync(~0u, square, 2);
            if (lane % 4 == 0) memory.squares[warp][lane / 4] = square;
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i)  // two rows of a feature, two of the one eight further
                memory.sums[warp][tile][(lane % 4 * 2 + i % 2) * PADDED + i / 2 * 8 + lane / 4] = sums[tile][i];
    }
};

__device__ __forceinline__ float added(const Memory& memory, int tile, int row, int feature) {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += memory.sums[warp][tile][row * PADDED + feature];
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
    constexpr int OUTPUTS = TILES * OUT_TILE;
    for (int place = threadIdx.x; place < rows * OUTPUTS; place += 32 * WARPS) {
        int row = place / OUTPUTS, tile = place % OUTPUTS / OUT_TILE, feature = place % OUT_TILE;
        long long target = (long long)row * features + blockIdx.x * OUTPUTS + place % OUTPUTS;
        float scale = NORM ? scale_of(memory, row, eps) : 1.0f;
        float total = added(memory, tile, row, feature) * scale;
        if (GATED) total = total / (1.0f + __expf(-total)) * (added(memory, tile, row, feature + OUT_TILE) * scale);
        if (RESIDUAL) total += low_of(residual[target]);
        out[target] = (u16)packed(total, total);
    }
}
