// out = x W^T (+ residual), or silu(first half) * second half of it, for 64 to some thousand rows on Hopper.
//
// A tile is 128 or 256 rows by FEATURES features. One thread loads turns of 64 columns into a ring of shared memory by
// the copy engine (TMA); two warp groups multiply ROW_BLOCKS blocks of 64 rows each. The thread blocks of a cluster
// share what they load: CLUSTER_ROWS tiles of rows have one piece of the weight, CLUSTER_FEATURES tiles of features
// have one piece of the rows, and each block loads its share and sends it to all of them. PARTS blocks of a cluster may
// also divide the columns of one tile; they add their sums through shared memory, always in the same order.
//
// Compiled at run time (wide_gemm.py), so there are no headers. What is not said here is defined in front of this file:
// ROW_BLOCKS, FEATURES, CLUSTER_ROWS, CLUSTER_FEATURES, PARTS, STAGES, GATED, ROUNDED (the gate takes sums rounded to
// bf16, as a kernel of its own would), RESIDUAL, EARLY (started while the previous kernel runs), WATCHED (an endless
// wait is an error), SLICES, SLICE_TURNS, KEPT (see wide_slices.cu), ORDERED (see wide_multiply.cu), and multiply() and
// multiply_first(), one tensor core instruction that adds to the sums or begins them. These two files, rounding.cu,
// common.cu and wide_ring.cu come before this one.

// ---- what becomes of the sums

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

__device__ __forceinline__ float gated(float gate, float up) {
    return ROUNDED ? rounded_gate(gate, up) : gate / (1.0f + __expf(-gate)) * up;
}

// Two parts of a cluster halve their sums: this one sends COUNT of them, from SENT on, to the other and adds what comes
// to those from MINE on.
template <int MINE, int SENT, int COUNT>
__device__ __forceinline__ void add_other_part(float* sums, u32 ring, int other) {
    static_assert(COUNT % 4 == 0, "sums are sent in fours");
    meet_cluster();  // nobody reads or fills a ring any more, nor what came through it
    u32 here = ring + threadIdx.x * 16, there = address_in(here, other);
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
        const float* sent = sums + SENT + i;
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
        for (int j = 0; j < 4; ++j) sums[MINE + i + j] += got[j];
    }
}

// Of a tile whose columns are divided: every part finishes a share of the sums. (0 + 1) + (2 + 3), whoever adds.
template <int PART = 1, int BEGIN = 0, int COUNT = TILE_SUMS>
__device__ __forceinline__ void store_share(float* sums, u32 ring, const Block& block, int row, int feature,
                                            const Output& output) {
    if constexpr (PART == PARTS) {
        output.store<COUNT>(sums + BEGIN, row + BEGIN / SUMS * 64, feature + BEGIN % SUMS * 2);
    } else {
        constexpr int HALF = COUNT / 2;
        int other = block.rank ^ (PART * SHARING);
        if (block.part & PART) {
            add_other_part<BEGIN + HALF, BEGIN, HALF>(sums, ring, other);
            store_share<2 * PART, BEGIN + HALF, HALF>(sums, ring, block, row, feature, output);
        } else {
            add_other_part<BEGIN, BEGIN + HALF, HALF>(sums, ring, other);
            store_share<2 * PART, BEGIN, HALF>(sums, ring, block, row, feature, output);
        }
    }
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
              const unsigned short* residual, unsigned short* out, float* deep, int rows, int features, int turns,
              int tiles_m, int tiles_n, int once) {
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
        for (int each = 0; each < GROUPS; ++each) init_barrier(&barriers.order[each], 4);  // every warp of the other
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    meet_cluster();
    launch_next_kernel();
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
        float sums[ROW_BLOCKS][SUMS];
        Waiting waiting{ring + STAGES * STAGE_BYTES, deep + (long long)blockIdx.x * DEEP_SUMS};
        Multiplier multiplier{ring, barriers, block, group};
        for (int tile = block.cluster; tile < tiles_m * tiles_n; tile += block.clusters) {
            if constexpr (SLICES > 1)
                sum_slices(sums, multiplier, waiting);
            else
                multiplier.sum(sums, turns);
            Place place = block.place(tile, tiles_m, tiles_n);
            if constexpr (PARTS > 1)
                store_share(&sums[0][0], ring, block, place.row + inside, place.feature, output);
            else
                store_tile(sums, place.row + inside, place.feature, output);
        }
    }
    if (CLUSTER > 1) meet_cluster();  // others may still arrive at this block's barriers
}
