// out = x W^T (+ residual), or silu(first half) * second half of it, for 64 to some thousand rows on Hopper.
//
// A tile is 128 or 256 rows by FEATURES features. One thread loads turns of 64 columns into a ring of shared memory by
// the copy engine (TMA); two warp groups multiply ROW_BLOCKS blocks of 64 rows each. The thread blocks of a cluster
// share what they load: CLUSTER_ROWS tiles of rows have one piece of the weight, CLUSTER_FEATURES tiles of features
// have one piece of the rows, and each block loads its share and sends it to all of them. PARTS blocks of a cluster may
// also divide the columns of one tile; they add their sums through shared memory, always in the same order.
//
// Compiled at run time (wide_gemm.py), so there are no headers. What is not said here is defined in front of this file:
// ROW_BLOCKS, FEATURES, CLUSTER_ROWS, CLUSTER_FEATURES, PARTS, STAGES, GATED, RESIDUAL, EARLY (started while the
// previous kernel runs), WATCHED (an endless wait is an error), and multiply(), one tensor core instruction.

constexpr int ROWS = 128 * ROW_BLOCKS;
constexpr int COLUMNS = 64;  // of a turn: 128 bytes, the widest row that the copy engine swizzles
constexpr int ROW_BYTES = 2 * COLUMNS;
constexpr int BLOCK_BYTES = 64 * ROW_BYTES;  // 64 rows: what one instruction multiplies
constexpr int SHARING = CLUSTER_ROWS * CLUSTER_FEATURES;
constexpr int CLUSTER = SHARING * PARTS;
constexpr int W_PIECES = (GATED || CLUSTER_ROWS == 2) ? 2 : 1;  // gate and up lie apart in the weight
constexpr int W_PIECE_BYTES = FEATURES / W_PIECES * ROW_BYTES;
constexpr int X_PIECE_BYTES = ROWS / CLUSTER_FEATURES * ROW_BYTES;
constexpr int W_BYTES = FEATURES * ROW_BYTES;
constexpr int X_BYTES = ROWS * ROW_BYTES;
constexpr int STAGE_BYTES = W_BYTES + X_BYTES;
constexpr int OUT_FEATURES = GATED ? FEATURES / 2 : FEATURES;
constexpr int SUMS = FEATURES / 2;  // of a thread in one block of 64 rows
constexpr int GROUPS = 2, GROUP_THREADS = 128;
// Many sums take more registers than an equal share: a whole warp group loads then, and leaves most of its own.
constexpr bool LARGE = ROW_BLOCKS * SUMS > 96;
constexpr int PLACE_BYTES = 4 * GROUPS * GROUP_THREADS;  // of one sum of every multiplying thread
constexpr int THREADS = GROUPS * GROUP_THREADS + (LARGE ? GROUP_THREADS : 32);
constexpr int BAND = 8;  // tiles of rows that go over the weight together: the L2 cache keeps their part of it

static_assert(CLUSTER_ROWS <= 2 && CLUSTER <= 8 && (CLUSTER & (CLUSTER - 1)) == 0 && PARTS <= 4, "no such cluster");
static_assert(FEATURES % 16 == 0 && FEATURES <= 256, "no such tile");
static_assert(W_PIECE_BYTES % 1024 == 0 && X_PIECE_BYTES % 1024 == 0, "a piece must be whole atoms of the swizzle");
static_assert(PARTS == 1 || (!GATED && ROW_BLOCKS * SUMS % (4 * PARTS) == 0), "no such share of the sums");

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {
    u64 words[16];
};

struct Barriers {
    u64 full[STAGES];  // the bytes of a stage have arrived
    u64 free[STAGES];  // a stage has been read by everybody that shares it
};

struct Place {
    int row, feature;
};

// ---- barriers and copies

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    u32 address;
    asm("{\n.reg .u64 wide;\ncvta.to.shared.u64 wide, %1;\ncvt.u32.u64 %0, wide;\n}" : "=r"(address) : "l"(pointer));
    return address;
}

__device__ __forceinline__ void init_barrier(u64* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// Waits and arrivals say no scope: with that of the cluster the compiler adds a fence of the whole GPU to each turn, a
// microsecond. What they guard is written by the copy engine and read by the tensor cores, which need none.
__device__ __forceinline__ bool phase_is_over(u64* barrier, u32 parity) {
    u32 over;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(over)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return over;
}

// WATCHED: so many tries in vain are an error. A clock is not looked at: reading it takes longer than a turn of the ring.
__device__ __forceinline__ void wait_for(u64* barrier, u32 parity) {
    for (u32 tries = 0; !phase_is_over(barrier, parity); tries++) {
        if (WATCHED && tries > 1u << 22) __trap();
    }
}

__device__ __forceinline__ void expect_stage(u64* barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(STAGE_BYTES)
                 : "memory");
}

__device__ __forceinline__ u32 address_in(u32 address, u32 block) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
    return there;
}

__device__ __forceinline__ void arrive_in(u64* barrier, u32 block) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(
                     address_in(shared_address(barrier), block))
                 : "memory");
}

__device__ __forceinline__ u64 read_once_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ u64 usual_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// A piece of a matrix to the same place of every thread block in `blocks`, whose barriers count its bytes.
template <bool SHARED_PIECE>
__device__ __forceinline__ void load(u32 to, const TensorMap& map, int column, int row, u64* barrier, int blocks,
                                     u64 policy) {
    if (SHARED_PIECE) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
            ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
            "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"((unsigned short)blocks), "l"(policy)
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
            " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
            "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)), "l"(policy)
            : "memory");
    }
}

__device__ __forceinline__ void meet_cluster() {
    if (CLUSTER == 1) {
        __syncthreads();
        return;
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_for_previous_kernel() {
    if (EARLY) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- where a thread block works

struct Block {
    int rank, part, row_tile, feature_tile, first;  // within the cluster; `first` is the first block of this part
    int cluster, clusters;

    __device__ __forceinline__ Block() {
        rank = blockIdx.x % CLUSTER;
        cluster = blockIdx.x / CLUSTER;
        clusters = gridDim.x / CLUSTER;
        part = rank / SHARING;
        first = part * SHARING;
        feature_tile = rank % SHARING / CLUSTER_ROWS;
        row_tile = rank % CLUSTER_ROWS;
    }

    // First row and output feature of this block in a cluster's tile.
    __device__ __forceinline__ Place place(int tile, int tiles_m, int tiles_n) const {
        int band = tile / (BAND * tiles_n), inside = tile % (BAND * tiles_n);
        int height = min(tiles_m - band * BAND, BAND);
        int m = band * BAND + inside % height, n = inside / height;
        return {(m * CLUSTER_ROWS + row_tile) * ROWS, (n * CLUSTER_FEATURES + feature_tile) * OUT_FEATURES};
    }
};

struct Turn {
    int stage = 0;
    u32 phase = 0;

    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// ---- the thread that loads

struct Loader {
    const TensorMap &weight, &x;
    u32 ring;
    Barriers& barriers;
    Block block;
    int apart;  // rows of the weight between a gate and its up
    u64 weight_policy, x_policy;

    __device__ __forceinline__ void load_weight(int stage, int column, int feature) {
        u32 to = ring + stage * STAGE_BYTES + X_BYTES;
        int blocks = ((1 << CLUSTER_ROWS) - 1) << (block.first + block.feature_tile * CLUSTER_ROWS);
#pragma unroll
        for (int piece = 0; piece < W_PIECES; ++piece) {
            if (CLUSTER_ROWS == 2 && piece != block.row_tile) continue;
            int row = feature + piece * (GATED ? apart : FEATURES / W_PIECES);
            load<CLUSTER_ROWS == 2>(to + piece * W_PIECE_BYTES, weight, column, row, &barriers.full[stage], blocks,
                                    weight_policy);
        }
    }

    __device__ __forceinline__ void load_rows(int stage, int column, int row) {
        u32 to = ring + stage * STAGE_BYTES + block.feature_tile * X_PIECE_BYTES;
        int blocks = 0;
#pragma unroll
        for (int tile = 0; tile < CLUSTER_FEATURES; ++tile)
            blocks |= 1 << (block.first + tile * CLUSTER_ROWS + block.row_tile);
        load<(CLUSTER_FEATURES > 1)>(to, x, column, row + block.feature_tile * (ROWS / CLUSTER_FEATURES),
                                     &barriers.full[stage], blocks, x_policy);
    }

    // The first stages get their weights at once, their rows when the previous kernel has ended.
    __device__ __forceinline__ void run(int turns, int tiles_m, int tiles_n) {
        int first_column = block.part * turns * COLUMNS, early = min(STAGES, turns), done = 0;
        Place place = block.place(block.cluster, tiles_m, tiles_n);
        for (int turn = 0; turn < early; ++turn) {
            expect_stage(&barriers.full[turn]);
            load_weight(turn, first_column + turn * COLUMNS, place.feature);
        }
        wait_for_previous_kernel();
        Turn now;
        for (int tile = block.cluster; tile < tiles_m * tiles_n; tile += block.clusters) {
            place = block.place(tile, tiles_m, tiles_n);
            for (int turn = 0; turn < turns; ++turn, ++done, now.next()) {
                int column = first_column + turn * COLUMNS;
                if (done >= early) {
                    wait_for(&barriers.free[now.stage], now.phase ^ 1);  // at once in the ring's first round
                    expect_stage(&barriers.full[now.stage]);
                    load_weight(now.stage, column, place.feature);
                }
                load_rows(now.stage, column, place.row);
            }
        }
    }
};

// ---- the warp groups that multiply

__device__ __forceinline__ u64 operand(u32 address) {
    // Rows of 128 bytes, swizzled; eight of them are an atom of 1,024 bytes.
    return (u64)((address & 0x3ffff) >> 4) | (1ull << 16) | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

template <int LEFT>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void release(Barriers& barriers, int stage, const Block& block) {
    int lane = threadIdx.x % 32;
    if (lane < SHARING) arrive_in(&barriers.free[stage], block.first + lane);
}

// The sums of one tile over this block's columns.
__device__ __forceinline__ void multiply_tile(float (&sums)[ROW_BLOCKS][SUMS], u32 ring, Barriers& barriers, Turn& now,
                                              int turns, int group, const Block& block) {
    int before = 0;
    for (int turn = 0; turn < turns; ++turn) {
        wait_for(&barriers.full[now.stage], now.phase);
        u64 rows = operand(ring + now.stage * STAGE_BYTES + group * ROW_BLOCKS * BLOCK_BYTES);
        u64 features = operand(ring + now.stage * STAGE_BYTES + X_BYTES);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int step = 0; step < COLUMNS / 16; ++step) {
#pragma unroll
            for (int each = 0; each < ROW_BLOCKS; ++each)  // an address counts 16 bytes; a step is 32 of a row
                multiply(sums[each], rows + each * (BLOCK_BYTES / 16) + 2 * step, features + 2 * step, turn | step);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        wait_for_products<1>();
        if (turn) release(barriers, before, block);
        before = now.stage;
        now.next();
    }
    wait_for_products<0>();
    release(barriers, before, block);
}

// ---- what becomes of the sums

__device__ __forceinline__ u32 packed(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float low_of(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high_of(u32 both) { return __uint_as_float(both & 0xffff0000u); }

// Four neighbouring lanes exchange four words each: lane i's word j becomes lane j's word i.
__device__ __forceinline__ void exchange(u32 (&words)[4]) {
    bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        u32 got = __shfl_xor_sync(~0u, odd ? words[i] : words[i + 1], 1);
        words[i] = odd ? got : words[i];
        words[i + 1] = odd ? words[i + 1] : got;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        u32 got = __shfl_xor_sync(~0u, upper ? words[i] : words[i + 2], 2);
        words[i] = upper ? got : words[i];
        words[i + 2] = upper ? words[i + 2] : got;
    }
}

struct Output {
    const unsigned short* residual;
    unsigned short* out;
    int rows, features;

    // Two sums of each of four groups of eight features, in one row: 16 bytes of one group for each lane.
    __device__ __forceinline__ void four_groups(const float* sums, int row, int feature) const {
        int mine = feature + threadIdx.x % 4 * 8;
        bool inside = row < rows && mine < features;
        long long place = (long long)row * features + mine;
        u32 words[4], added[4] = {0, 0, 0, 0};
        if (RESIDUAL) {
            if (inside) {
                uint4 read = *(const uint4*)(residual + place);
                added[0] = read.x, added[1] = read.y, added[2] = read.z, added[3] = read.w;
            }
            exchange(added);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float low = sums[4 * i], high = sums[4 * i + 1];
            words[i] = RESIDUAL ? packed(low + low_of(added[i]), high + high_of(added[i])) : packed(low, high);
        }
        exchange(words);
        if (inside) *(uint4*)(out + place) = make_uint4(words[0], words[1], words[2], words[3]);
    }

    __device__ __forceinline__ void one_group(const float* sums, int row, int feature) const {
        int mine = feature + threadIdx.x % 4 * 2;
        if (row >= rows || mine >= features) return;
        long long place = (long long)row * features + mine;
        u32 added = RESIDUAL ? *(const u32*)(residual + place) : 0;
        *(u32*)(out + place) = RESIDUAL ? packed(sums[0] + low_of(added), sums[1] + high_of(added))
                                        : packed(sums[0], sums[1]);
    }

    // Sums as the tensor cores leave them: of each group of eight features two in a row, two in the eighth row after.
    template <int COUNT>
    __device__ __forceinline__ void store(const float* sums, int row, int feature) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i + 16 <= COUNT; i += 16) four_groups(sums + i + 2 * half, row + 8 * half, feature + 2 * i);
#pragma unroll
            for (int i = COUNT / 16 * 16; i < COUNT; i += 4)
                one_group(sums + i + 2 * half, row + 8 * half, feature + 2 * i);
        }
    }
};

__device__ __forceinline__ float gated(float gate, float up) { return gate / (1.0f + __expf(-gate)) * up; }

// Two parts of a cluster halve their 2 COUNT sums: this one keeps the lower or upper half in front and adds the other
// part's to it.
template <int COUNT>
__device__ __forceinline__ void add_other_part(float* sums, u32 ring, int other, bool upper) {
    static_assert(COUNT % 4 == 0, "sums are sent in fours");
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        float low = sums[i], high = sums[COUNT + i];
        sums[i] = upper ? high : low;
        sums[COUNT + i] = upper ? low : high;
    }
    meet_cluster();  // nobody reads or fills a ring any more, nor what came through it
    u32 here = ring + threadIdx.x * 16, there = address_in(here, other);
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
        const float* sent = sums + COUNT + i;
        asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(there + i * PLACE_BYTES), "f"(sent[0]),
                     "f"(sent[1]), "f"(sent[2]), "f"(sent[3])
                     : "memory");
    }
    meet_cluster();
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
        float got[4];
        asm volatile("ld.shared::cta.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(got[0]), "=f"(got[1]), "=f"(got[2]), "=f"(got[3])
                     : "r"(here + i * PLACE_BYTES)
                     : "memory");
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i + j] += got[j];
    }
}

// Of a tile whose columns are divided: every part finishes a share of the sums. (0 + 1) + (2 + 3), whoever adds.
__device__ __forceinline__ void store_share(float (&sums)[ROW_BLOCKS][SUMS], u32 ring, const Block& block, int row,
                                            int feature, const Output& output) {
    constexpr int ALL = ROW_BLOCKS * SUMS;
    float* all = &sums[0][0];
    add_other_part<ALL / 2>(all, ring, block.rank ^ SHARING, block.part & 1);
    int begin = block.part & 1 ? ALL / 2 : 0;
    if constexpr (PARTS == 4) {
        add_other_part<ALL / 4>(all, ring, block.rank ^ (2 * SHARING), block.part & 2);
        begin += block.part & 2 ? ALL / 4 : 0;
    }
    output.store<ALL / PARTS>(all, row + begin / SUMS * 64, feature + begin % SUMS * 2);
}

__device__ __forceinline__ void store_tile(float (&sums)[ROW_BLOCKS][SUMS], int row, int feature,
                                           const Output& output) {
#pragma unroll
    for (int block = 0; block < ROW_BLOCKS; ++block) {
        if constexpr (GATED) {
            float products[SUMS / 2];
#pragma unroll
            for (int i = 0; i < SUMS / 2; ++i) products[i] = gated(sums[block][i], sums[block][i + SUMS / 2]);
            output.store<SUMS / 2>(products, row + block * 64, feature);
        } else {
            output.store<SUMS>(sums[block], row + block * 64, feature);
        }
    }
}

// `turns` are those of one part, `tiles_m` and `tiles_n` count tiles of clusters; with `once` each weight is read by
// one cluster only and need not stay in the cache.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    wide_gemm(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,
              const unsigned short* residual, unsigned short* out, int rows, int features, int turns, int tiles_m,
              int tiles_n, int once) {
    extern __shared__ unsigned char memory[];
    __shared__ Barriers barriers;
    u32 ring = (shared_address(memory) + 1023) & ~1023u;  // the same in every block of the cluster
    Block block;
    int group = threadIdx.x / GROUP_THREADS;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(&barriers.full[stage], 1);
            init_barrier(&barriers.free[stage], SHARING * GROUPS * 4);  // every multiplying warp of those that share
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    meet_cluster();
    if (EARLY) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (group == GROUPS) {
        if (LARGE) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == GROUPS * GROUP_THREADS) {
            Loader loader{weight, x, ring, barriers, block, features, once ? read_once_policy() : usual_policy(),
                          usual_policy()};
            loader.run(turns, tiles_m, tiles_n);
        }
        __syncwarp();
        for (int part = 1; part < PARTS; part *= 2) {
            meet_cluster();
            meet_cluster();
        }
    } else {
        if (LARGE) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        wait_for_previous_kernel();
        Output output{residual, out, rows, features};
        int inside = group * ROW_BLOCKS * 64 + threadIdx.x % GROUP_THREADS / 32 * 16 + threadIdx.x % 32 / 4;
        Turn now;
        float sums[ROW_BLOCKS][SUMS] = {};
        for (int tile = block.cluster; tile < tiles_m * tiles_n; tile += block.clusters) {
            multiply_tile(sums, ring, barriers, now, turns, group, block);
            Place place = block.place(tile, tiles_m, tiles_n);
            if constexpr (PARTS > 1)
                store_share(sums, ring, block, place.row + inside, place.feature, output);
            else
                store_tile(sums, place.row + inside, place.feature, output);
        }
    }
    if (CLUSTER > 1) meet_cluster();  // others may still arrive at this block's barriers
}
