// The ring of wide_gemm.cu: sizes, barriers, copies, where a thread block works, the thread that loads.

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
constexpr int TILE_SUMS = ROW_BLOCKS * SUMS;
constexpr int GROUPS = 2, GROUP_THREADS = 128;
constexpr int PLACE_BYTES = 4 * GROUPS * GROUP_THREADS;  // of one sum of every multiplying thread
constexpr int BAND = 8;  // tiles of rows that go over the weight together: the L2 cache keeps their part of it

static_assert(CLUSTER_ROWS <= 2 && CLUSTER <= 8 && (CLUSTER & (CLUSTER - 1)) == 0 && PARTS <= 4, "no such cluster");
static_assert(FEATURES % 16 == 0 && FEATURES <= 256, "no such tile");
static_assert(W_PIECE_BYTES % 1024 == 0 && X_PIECE_BYTES % 1024 == 0, "a piece must be whole atoms of the swizzle");
static_assert(PARTS == 1 || (!GATED && ROW_BLOCKS * SUMS % (4 * PARTS) == 0), "no such share of the sums");

struct alignas(64) TensorMap {
    u64 words[16];
};

struct Barriers {
    u64 full[STAGES];  // the bytes of a stage have arrived
    u64 free[STAGES];  // a stage has been read by everybody that shares it
    u64 order[GROUPS];  // with ORDERED: the other warp group has issued a slice
};

struct Place {
    int row, feature;
};

// ---- barriers and copies

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

__device__ __forceinline__ void arrive_in(u64* barrier, u32 block, bool here) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .u32 there;\nsetp.ne.u32 p, %2, 0;\n"
        "@p mapa.shared::cluster.u32 there, %0, %1;\n"
        "@p mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(barrier)),
        "r"(block), "r"((u32)here)
        : "memory");
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

// Registers that were touched since may be summed into again.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
