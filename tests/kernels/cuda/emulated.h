// Enough of a GPU to run few_gemm.cu on a CPU: a thread for each of a block's, blocks one after another. What is one
// instruction there is a function here; barriers in shared memory count arrivals and bytes as the hardware's do.
#include <atomic>
#include <barrier>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Place3 { int x; };
static thread_local Place3 threadIdx;
static Place3 blockIdx, gridDim;
constexpr int BLOCK_THREADS = 320;
alignas(128) static unsigned char dynamic[256 << 10];

static float __uint_as_float(u32 word) { float value; memcpy(&value, &word, 4); return value; }
static u32 bits_of(float value) { u32 word; memcpy(&word, &value, 4); return word; }
static float low_of(u32 both) { return __uint_as_float(both << 16); }
static float high_of(u32 both) { return __uint_as_float(both & 0xffff0000u); }
static u32 rounded(float value) { u32 word = bits_of(value); return (word + 0x7fff + (word >> 16 & 1)) >> 16; }
static u32 packed(float low, float high) { return rounded(low) | rounded(high) << 16; }
static float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
static float emulated_exp(float value) { return std::exp(value); }
#define __expf emulated_exp
static void __threadfence() {}
template <class T> static T __ldcg(const T* place) { return *place; }
static int atomicAdd(int* place, int more) { int old = *place; *place += more; return old; }

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
static u32 __shfl_xor_sync(u32, u32 word, int mask) { return taken_from(threadIdx.x % 32 ^ mask, word); }
static float __shfl_xor_sync(u32, float value, int mask) {
    return __uint_as_float(taken_from(threadIdx.x % 32 ^ mask, bits_of(value)));
}
static int __shfl_sync(u32, int value, int lane) { return (int)taken_from(lane, (u32)value); }

// ---- barriers in shared memory

struct Counter { int expected, pending; long bytes; u32 phase; };
static std::mutex lock;
static std::condition_variable changed;
static std::map<u64*, Counter> counters;

static void end_phase(Counter& counter) {
    if (counter.pending < 0) { fprintf(stderr, "one arrival too many\n"); abort(); }
    if (counter.pending || counter.bytes) return;
    counter.phase ^= 1;
    counter.pending = counter.expected;
    changed.notify_all();
}
static void init_barrier(u64* barrier, int count) {
    std::lock_guard held(lock);
    counters[barrier] = {count, count, 0, 0};
}
static void publish_barriers() {}
static void arrive(u64* barrier, bool here) {
    if (!here) return;
    std::lock_guard held(lock);
    --counters.at(barrier).pending;
    end_phase(counters.at(barrier));
}
static void expect_bytes(u64* barrier, u32 bytes) {
    std::lock_guard held(lock);
    Counter& counter = counters.at(barrier);
    counter.bytes += bytes;
    --counter.pending;
    end_phase(counter);
}
static void wait_for(u64* barrier, u32 parity) {
    std::unique_lock held(lock);
    if (!changed.wait_for(held, std::chrono::seconds(60), [&] { return counters.at(barrier).phase != parity; })) {
        fprintf(stderr, "thread %d of block %d waits for ever\n", threadIdx.x, blockIdx.x);
        _Exit(1);
    }
}
static u32 shared_address(const void* pointer) { return (u32)((const unsigned char*)pointer - dynamic); }
static u64 read_once_policy() { return 0; }
static void copy_bytes(u32 to, const u16* from, u32 bytes, u64* barrier, u64) {
    if (to % 16 || (u64)from % 16 || bytes % 16) { fprintf(stderr, "a copy that is not aligned\n"); abort(); }
    memcpy(dynamic + to, from, bytes);
    std::lock_guard held(lock);
    counters.at(barrier).bytes -= bytes;
    end_phase(counters.at(barrier));
}

// ---- the previous kernel, whose results are there only after the wait for it

static std::atomic<int> launched;
static thread_local bool waited;
static const u16 *results, *results_end;
static void launch_next_kernel() { ++launched; }
static void wait_for_previous_kernel() { waited = true; }

// ---- operands and products

static uint4 load_words(const u16* place, bool real = true) {
    uint4 words = {0, 0, 0, 0};
    if (place >= results && place < results_end && !waited) { fprintf(stderr, "rows are read too early\n"); abort(); }
    if (real) memcpy(&words, place, 16);
    return words;
}
// Four matrices of 8 x 8: lane l names row l % 8 of matrix l / 8, and gets two numbers of row l / 4 of each.
static uint4 read_weights(u32 place) {
    Warp& warp = my_warp();
    int lane = threadIdx.x % 32;
    warp.words[lane][0] = place;
    warp.meeting.arrive_and_wait();
    u32 found[4];
    for (int i = 0; i < 4; ++i) memcpy(&found[i], dynamic + warp.words[8 * i + lane / 4][0] + lane % 4 * 4, 4);
    warp.meeting.arrive_and_wait();
    return {found[0], found[1], found[2], found[3]};
}
// m16n8k16: which numbers of the operands a lane has is the instruction's.
static void multiply(float (&sums)[4], uint4 weights, u32 low, u32 high) {
    Warp& warp = my_warp();
    int lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
    u32 mine[6] = {weights.x, weights.y, weights.z, weights.w, low, high};
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
    gridDim.x = blocks;
    for (int block = 0; block < blocks; ++block) {
        blockIdx.x = block;
        warps.clear();
        for (int warp = 0; warp < BLOCK_THREADS / 32; ++warp) warps.push_back(std::make_unique<Warp>());
        std::barrier<> meeting(BLOCK_THREADS);
        block_barrier = &meeting;
        memset(dynamic, 0xff, sizeof(dynamic));
        std::vector<std::thread> threads;
        for (int thread = 0; thread < BLOCK_THREADS; ++thread)
            threads.emplace_back([=] { threadIdx.x = thread; kernel(); });
        for (auto& thread : threads) thread.join();
    }
}
