// attention_cluster.cu on this machine: the threads of a cluster take turns, blocks have arrays for shared memory, and
// what the kernel needs of the chip is written out. Reads the tensors from stdin, writes the output and both caches.
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "bfloats.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __maxnreg__(count)
typedef unsigned short u16;
typedef unsigned long long u64;
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

[[noreturn]] static void fail(const char* what) {
    fprintf(stderr, "%s\n", what);
    exit(1);
}

// ---- threads that take turns

constexpr int ALL = 32 * WARPS * CLUSTER, BYTES = 64 << 10;
struct Place {
    int x;
};
static int me;  // of the cluster's threads
#define threadIdx Place{me % (32 * WARPS)}
static int first_block;
#define blockIdx Place{first_block + me / (32 * WARPS)}
static ucontext_t scheduler, contexts[ALL];
static std::vector<char> stacks;
static bool ended[ALL], waited[ALL];
static unsigned char memories[CLUSTER][BYTES] alignas(16);
static unsigned char* block_memory() { return memories[me / (32 * WARPS)]; }

static void yield() {
    int mine = me;
    swapcontext(&contexts[mine], &scheduler);
    me = mine;
}

struct Meeting {
    int arrived = 0, round = 0;
    int arrive(int count) {
        int mine = round;
        if (++arrived == count) arrived = 0, ++round;
        return mine;
    }
    void wait(int mine) {
        while (round == mine) yield();
    }
};
static Meeting cluster_meeting, warp_meetings[ALL / 32];
static int cluster_round[ALL];
static int arrivals, waits;
static void arrive_at_cluster() { cluster_round[me] = cluster_meeting.arrive(ALL), ++arrivals; }
static void wait_for_cluster() { cluster_meeting.wait(cluster_round[me]), ++waits; }
static void __syncwarp() {
    Meeting& meeting = warp_meetings[me / 32];
    meeting.wait(meeting.arrive(32));
}

struct Shown {
    u32 words[6];
};
static Shown shown[ALL];
static Shown& lane(int index) { return shown[me / 32 * 32 + index]; }
static u32 from_lane(u32 word, int index) {
    shown[me].words[0] = word;
    __syncwarp();
    u32 got = lane(index).words[0];
    __syncwarp();
    return got;
}
static uint4 from_lane(const uint4& words, int index) {
    u32 x = from_lane(words.x, index), y = from_lane(words.y, index);
    u32 z = from_lane(words.z, index), w = from_lane(words.w, index);
    return {x, y, z, w};
}

// ---- numbers

static float rsqrtf(float value) { return 1.0f / sqrtf(value); }
static float lowest() { return -INFINITY; }
static float power_of_two(float exponent) { return exp2f(exponent); }
static u32 low_halves(u32 one, u32 other) { return (one & 0xffff) | other << 16; }
static u32 high_halves(u32 one, u32 other) { return one >> 16 | (other & 0xffff0000u); }
static float __shfl_xor_sync(u32, float value, int lanes) { return __uint_as_float(from_lane(__float_as_uint(value), me % 32 ^ lanes)); }

// ---- the chip

static void launch_next_kernel() {}
static void wait_for_previous_kernel() { waited[me] = true; }
static uint4 load(const u16* place) {
    if ((size_t)place % 16) fail("a load that is not aligned");
    return *(const uint4*)place;
}
static uint4 load_early(const u16* place, bool real) { return real ? load(place) : uint4{0, 0, 0, 0}; }
static uint4 load_row(const u16* place, bool real) {
    if (!waited[me]) fail("rows are read too early");
    return real ? load(place) : uint4{0, 0, 0, 0};
}
static float4 load_floats(const float* place) { return {place[0], place[1], place[2], place[3]}; }
static int load_number(const int* place) { return *place; }
static void store_at(int block, float* place, float4 numbers) {
    size_t offset = (unsigned char*)place - block_memory();
    if (block < 0 || block >= CLUSTER || offset % 16 || offset + 16 > SHARED) fail("a store beside the memory");
    if (!cluster_meeting.round) fail("a store to a block that may not have begun");
    memcpy(memories[block] + offset, &numbers, 16);
}

static u32 transposed(u32 word) {
    shown[me].words[0] = word;
    __syncwarp();
    int row = me % 32 / 4, column = me % 4;
    u32 found = 0;
    for (int i = 0; i < 2; ++i) {
        u32 both = lane((2 * column + i) * 4 + row / 2).words[0];
        found |= (row % 2 ? both >> 16 : both & 0xffff) << 16 * i;
    }
    __syncwarp();
    return found;
}

// m16n8k16: which numbers of the operands a lane has is the instruction's.
static void multiply(float (&sums)[4], u32 first, u32 second, u32 third, u32 fourth, u32 low, u32 high) {
    shown[me] = {{first, second, third, fourth, low, high}};
    __syncwarp();
    int mine = me % 32;
    for (int i = 0; i < 4; ++i) {
        int row = mine / 4 + i / 2 * 8, column = mine % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            u32 a = lane(row % 8 * 4 + k % 8 / 2).words[k / 8 * 2 + row / 8];
            u32 b = lane(column * 4 + k % 8 / 2).words[4 + k / 8];
            sums[i] += (k % 2 ? high_of(a) : low_of(a)) * (k % 2 ? high_of(b) : low_of(b));
        }
    }
    __syncwarp();
}

#include KERNEL

// ---- a launch

template <typename Number>
static std::vector<Number> numbers(size_t count) {
    std::vector<Number> found(count + 8);
    if (count && fread(found.data(), sizeof(Number), count, stdin) != count) fail("too little input");
    return found;
}

static std::vector<u16> qkv, k_cache, v_cache, out;
static std::vector<int> tables, rows, lengths;
static std::vector<float> rope, q_gains, k_gains;
static float eps, scale;
static int window, q_stride, table_stride;
static bool has_rows;

static void run_thread() {
    cluster_decode(qkv.data(), k_cache.data(), v_cache.data(), tables.data(), has_rows ? rows.data() : nullptr,
                   lengths.data(), rope.data(), q_gains.data(), k_gains.data(), out.data(), eps, scale, window, q_stride,
                   table_stride);
    ended[me] = true;
    swapcontext(&contexts[me], &scheduler);
}

static void run_cluster(bool backwards) {
    memset(memories, 0xff, sizeof memories);  // whatever is read before it is written is not a number
    cluster_meeting = Meeting(), arrivals = waits = 0;
    for (int thread = 0; thread < ALL; ++thread) {
        getcontext(&contexts[thread]);
        contexts[thread].uc_stack.ss_sp = &stacks[(size_t)thread << 15];
        contexts[thread].uc_stack.ss_size = 1 << 15;
        makecontext(&contexts[thread], run_thread, 0);
        ended[thread] = waited[thread] = false;
    }
    for (bool left = true; left;) {
        left = false;
        for (int turn = 0; turn < ALL; ++turn) {
            int thread = backwards ? ALL - 1 - turn : turn;
            if (ended[thread]) continue;
            left = true;
            me = thread;
            swapcontext(&scheduler, &contexts[thread]);
        }
    }
    if (arrivals != waits || arrivals % ALL) fail("a thread did not meet the others");
}

int main(int, char** given) {
    int count = atoi(given[1]), table_rows = atoi(given[2]), pages = atoi(given[3]), positions = atoi(given[4]);
    eps = atof(given[5]), scale = atof(given[6]), window = atoi(given[7]);
    q_stride = atoi(given[8]), table_stride = atoi(given[9]), has_rows = atoi(given[10]);
    if (sizeof(Memory) != SHARED) fail("the host counts the shared memory otherwise");
    size_t cached = (size_t)pages * KV * PAGE * DIM;
    qkv = numbers<u16>((size_t)count * q_stride), k_cache = numbers<u16>(cached), v_cache = numbers<u16>(cached);
    q_gains = numbers<float>(NORM ? DIM : 0), k_gains = numbers<float>(NORM ? DIM : 0);
    tables = numbers<int>((size_t)table_rows * table_stride), rows = numbers<int>(has_rows ? count : 0);
    lengths = numbers<int>(count), rope = numbers<float>((size_t)positions * DIM);
    out.assign((size_t)count * KV * GROUP * DIM, 0x7fc0);
    stacks.resize((size_t)ALL << 15);
    for (int cluster = 0; cluster < count * KV; ++cluster) first_block = cluster * CLUSTER, run_cluster(cluster % 2);
    fwrite(out.data(), 2, out.size(), stdout);
    fwrite(k_cache.data(), 2, cached, stdout), fwrite(v_cache.data(), 2, cached, stdout);
}
