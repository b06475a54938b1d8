// Enough of a GPU to run few_gemm.cu on a CPU: a thread for each of a block's, blocks one after another. What is one
// instruction there is a function here.
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "bfloats.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

typedef unsigned short u16;
typedef unsigned long long u64;
struct alignas(16) uint4 { u32 x, y, z, w; };
struct Place3 { int x; };
static thread_local Place3 threadIdx;
static Place3 blockIdx;
constexpr int BLOCK_THREADS = 32 * WARPS;

static float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
static float emulated_exp(float value) { return std::exp(value); }
#define __expf emulated_exp
template <class T> static T __ldg(const T* place) { return *place; }

// ---- warps

struct Warp {
    std::barrier<> meeting{32};
    u32 words[32][8];
};
static std::vector<std::unique_ptr<Warp>> warps;
static std::barrier<>* block_barrier;
static Warp& my_warp() { return *warps[threadIdx.x / 32]; }
static void __syncwarp() { my_warp().meeting.arrive_and_wait(); }
static void __syncthreads() { block_barrier->arrive_and_wait(); }

static u32 taken_from(int lane, u32 word) {
    Warp& warp = my_warp();
    warp.words[threadIdx.x % 32][0] = word;
    warp.meeting.arrive_and_wait();
    u32 found = warp.words[lane][0];
    warp.meeting.arrive_and_wait();
    return found;
}
static float __shfl_xor_sync(u32, float value, int mask) {
    return __uint_as_float(taken_from(threadIdx.x % 32 ^ mask, __float_as_uint(value)));
}

// ---- the previous kernel, whose results are there only after the wait for it

static std::atomic<int> launched;
static thread_local bool waited;
static void launch_next_kernel() { ++launched; }
static void wait_for_previous_kernel() { waited = true; }

// ---- operands and products

static u64 read_once_policy() { return 0; }
static uint4 loaded(const u16* place) {
    if ((u64)place % 16) { fprintf(stderr, "a load that is not aligned\n"); abort(); }
    uint4 words;
    memcpy(&words, place, 16);
    return words;
}
static std::atomic<long> early_loads;
static uint4 load_once(const u16* place, u64) {
    early_loads += !waited;
    return loaded(place);
}
static uint4 load_row(const u16* place, bool real) {
    if (!waited) { fprintf(stderr, "rows are read too early\n"); abort(); }
    return real ? loaded(place) : uint4{0, 0, 0, 0};
}
static u32 multiply_pair(u32 one, u32 other) {
    return packed(low_of(one) * low_of(other), high_of(one) * high_of(other));
}
// m16n8k16: which numbers of the operands a lane has is the instruction's.
static void multiply(float (&sums)[4], u32 first, u32 second, u32 third, u32 fourth, u32 low, u32 high) {
    Warp& warp = my_warp();
    int lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
    u32 mine[6] = {first, second, third, fourth, low, high};
    memcpy(warp.words[lane], mine, sizeof(mine));
    warp.meeting.arrive_and_wait();
    for (int i = 0; i < 4; ++i) {
        int row = group + i / 2 * 8, column = member * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            u32 a = warp.words[row % 8 * 4 + k % 8 / 2][k / 8 * 2 + row / 8];
            u32 b = warp.words[column * 4 + k % 8 / 2][4 + k / 8];
            sums[i] += (k % 2 ? high_of(a) : low_of(a)) * (k % 2 ? high_of(b) : low_of(b));
        }
    }
    warp.meeting.arrive_and_wait();
}

template <class Kernel>
static void run_blocks(int blocks, Kernel kernel) {
    for (int block = 0; block < blocks; ++block) {
        blockIdx.x = block;
        warps.clear();
        for (int warp = 0; warp < BLOCK_THREADS / 32; ++warp) warps.push_back(std::make_unique<Warp>());
        std::barrier<> meeting(BLOCK_THREADS);
        block_barrier = &meeting;
        std::vector<std::thread> threads;
        for (int thread = 0; thread < BLOCK_THREADS; ++thread)
            threads.emplace_back([=] { threadIdx.x = thread; kernel(); });
        for (auto& thread : threads) thread.join();
    }
}
