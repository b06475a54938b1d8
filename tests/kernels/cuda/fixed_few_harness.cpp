// fixed_few.cu on this machine: its threads take turns, its shared memory is an array, and what it needs of the chip is
// written out. A product instruction adds 16 products and the sum before exactly, and rounds once.
// Reads x, weight, gain, bias, residual (bf16, but a gain of NORM == 4) from stdin, writes the output.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "bfloats.h"

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __align__(bytes)
#define __launch_bounds__(threads)
using std::min;
typedef unsigned long long u64;
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

// ---- threads that take turns

static struct {
    int x;
} threadIdx, blockIdx;
alignas(16) static unsigned char memory[232448];
static ucontext_t scheduler, contexts[THREADS];
static char stacks[THREADS][1 << 16];
static bool ended[THREADS];

static void yield() {
    int me = threadIdx.x;
    swapcontext(&contexts[me], &scheduler);
    threadIdx.x = me;
}

struct Meeting {
    int arrived = 0, round = 0;
    void meet(int count) {
        int mine = round;
        if (++arrived == count)
            arrived = 0, ++round;
        else
            while (round == mine) yield();
    }
};
static Meeting block_meeting, warp_meetings[THREADS / 32];
static void __syncthreads() { block_meeting.meet(THREADS); }
static void __syncwarp() { warp_meetings[threadIdx.x / 32].meet(32); }

// What lanes of a warp show one another.
struct Shown {
    u32 from;
    u32 words[4];
    float value;
};
static Shown shown[THREADS];
static Shown& lane(int index) { return shown[threadIdx.x / 32 * 32 + index]; }

static float __shfl_xor_sync(u32, float value, int lanes) {
    shown[threadIdx.x].value = value;
    __syncwarp();
    float got = shown[threadIdx.x ^ lanes].value;
    __syncwarp();
    return got;
}

// ---- numbers

static float rounded(float value) { return low_of(narrow(value)); }
static float rounded_gate(float gate, float up) { return (rounded(gate) + 0.5f) * rounded(up); }  // any other would do
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static float __fmul_rn(float a, float b) { return a * b; }
static float inverse_root(float value) { return 1.0f / sqrtf(value); }

// ---- the chip

static int expected[1 << 16], copied[1 << 16];
static u32 shared_address(const void* pointer) { return (u32)((const unsigned char*)pointer - memory); }
static void init_barrier(u32 barrier) { expected[barrier / 8] = copied[barrier / 8] = 0; }
static void show_barriers() {}
static void expect_bytes(u32 barrier, int bytes) { expected[barrier / 8] = bytes; }
static void wait_for(u32 barrier) {
    if (!expected[barrier / 8] || expected[barrier / 8] != copied[barrier / 8]) abort();
}
static void copy_weights(u32 to, const void* from, int bytes, u32 barrier) {
    if (to % 16 || (size_t)from % 16 || bytes % 16 || to + bytes > SHARED) abort();
    memcpy(memory + to, from, bytes);
    copied[barrier / 8] += bytes;
}
static void let_next_kernel_start() {}
static void wait_for_previous_kernel() {}

static void load_matrices(u32 (&words)[4], u32 from) {
    if (from % 16 || from + 16 > SHARED) abort();
    shown[threadIdx.x].from = from;
    __syncwarp();
    int me = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) memcpy(&words[i], memory + lane(8 * i + me / 4).from + me % 4 * 4, 4);
    __syncwarp();
}

static void multiply(float (&sums)[4], u32 row, u32 row_behind, u32 feature, u32 feature_behind) {
    Shown& mine = shown[threadIdx.x];
    mine.words[0] = row, mine.words[1] = row_behind, mine.words[2] = feature, mine.words[3] = feature_behind;
    __syncwarp();
    int me = threadIdx.x % 32;
    for (int i = 0; i < 2; ++i) {
        double sum = sums[i];
        for (int half = 0; half < 2; ++half)
            for (int k = 0; k < 4; ++k) {
                u32 a = lane(me / 4 * 4 + k).words[half], b = lane((me % 4 * 2 + i) * 4 + k).words[2 + half];
                sum += (double)low_of(a) * low_of(b) + (double)high_of(a) * high_of(b);
            }
        sums[i] = (float)sum;
    }
    __syncwarp();
}

#include KERNEL

template <typename Number>
static std::vector<Number> numbers(size_t count) {
    std::vector<Number> found(count + 8);
    // As aligned as torch's memory.
    if (count && fread(found.data(), sizeof(Number), count, stdin) != count) abort();
    return found;
}

static u16 *x, *weight, *bias, *residual, *out;
static void* gain;
static float eps;
static int num_rows, features;

static void run_thread() {
    fixed_few(x, weight, gain, bias, residual, out, eps, num_rows, features);
    ended[threadIdx.x] = true;
    swapcontext(&contexts[threadIdx.x], &scheduler);
}

int main(int, char** given) {
    num_rows = atoi(given[1]), features = atoi(given[2]), eps = atof(given[3]);
    int rows_of_weight = features * (GATED ? 2 : 1);
    auto xs = numbers<u16>(num_rows * WIDTH), weights = numbers<u16>((size_t)rows_of_weight * WIDTH);
    auto gains = numbers<u16>(NORM / 2 * WIDTH), biases = numbers<u16>(BIAS ? rows_of_weight : 0);
    auto residuals = numbers<u16>(RESIDUAL ? num_rows * features : 0);
    std::vector<u16> found(num_rows * features + 8, 0x7fc0);
    x = xs.data(), weight = weights.data(), gain = gains.data(), bias = biases.data(), residual = residuals.data();
    out = found.data();
    int blocks = (features + 8 * TILES - 1) / (8 * TILES);
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        memset(memory, 0xff, sizeof memory);  // whatever is read before it is written is not a number
        for (int thread = 0; thread < THREADS; ++thread) {
            getcontext(&contexts[thread]);
            contexts[thread].uc_stack.ss_sp = stacks[thread];
            contexts[thread].uc_stack.ss_size = sizeof stacks[thread];
            makecontext(&contexts[thread], run_thread, 0);
            ended[thread] = false;
        }
        for (bool left = true; left;) {
            left = false;
            for (int thread = 0; thread < THREADS; ++thread) {
                if (ended[thread]) continue;
                left = true;
                threadIdx.x = thread;
                swapcontext(&scheduler, &contexts[thread]);
            }
        }
    }
    fwrite(out, 2, num_rows * features, stdout);
}
