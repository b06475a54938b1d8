// Sums in slices: each slice from zero, then the slices in the tree of quire/kernels/slices.py, which depends on their
// number alone.
//
// Where the tree is kept: INNER slices add up in registers (of four, two sums wait beside the one that grows; where a
// sum takes too many registers, of two or none). Sums of nodes wait in a binary counter, whose first place is in shared
// memory with KEPT and whose others are in memory of the block's own: the longer a sum, the more rarely it is put away.
// Every thread puts away and takes back its own sums, so nobody waits for anybody.

// Slices of this block, how many add up in registers, nodes of so many.
constexpr int RUN = SLICES == 1 ? 1 : SLICES / PARTS;
constexpr int MOST_INNER = TILE_SUMS <= 64 ? 4 : TILE_SUMS <= 96 ? 2 : 1;
constexpr int INNER = RUN < MOST_INNER ? RUN : MOST_INNER;
constexpr int NODES = RUN / INNER;

__device__ constexpr int bits_of(int value) { return value ? 1 + bits_of(value / 2) : 0; }

constexpr int PLACES = bits_of(NODES - 1);
constexpr int DEEP_PLACES = PLACES > KEPT ? PLACES - KEPT : 0;
// Many sums take more registers than an equal share: a whole warp group loads then, and leaves most of its own.
constexpr bool LARGE = TILE_SUMS * (INNER == 4 ? 3 : INNER) > 96;
constexpr int THREADS = GROUPS * GROUP_THREADS + (LARGE ? GROUP_THREADS : 32);
constexpr int DEEP_SUMS = DEEP_PLACES * TILE_SUMS * GROUPS * GROUP_THREADS;

static_assert(SLICES == 1 || RUN * PARTS == SLICES, "parts have unequal numbers of slices");
static_assert(NODES * INNER == RUN && (INNER & (INNER - 1)) == 0, "slices are left over");
static_assert(PARTS == 1 || SLICES == 1 || (RUN & (RUN - 1)) == 0, "a part must be a node of the tree");
static_assert(TILE_SUMS % 4 == 0 || PLACES == 0, "sums are put away in fours");

__device__ __forceinline__ void add(float (&sums)[ROW_BLOCKS][SUMS], const float (&others)[ROW_BLOCKS][SUMS]) {
#pragma unroll
    for (int i = 0; i < TILE_SUMS; ++i) (&sums[0][0])[i] += (&others[0][0])[i];
}

// The node over the next INNER slices.
template <class Multiplier>
__device__ __forceinline__ void sum_node(float (&sums)[ROW_BLOCKS][SUMS], Multiplier& multiplier) {
    multiplier.sum_slice(sums);
    if constexpr (INNER > 1) {
        float second[ROW_BLOCKS][SUMS];
        multiplier.sum_slice(second);
        add(sums, second);
    }
    if constexpr (INNER > 2) {
        float third[ROW_BLOCKS][SUMS], fourth[ROW_BLOCKS][SUMS];
        multiplier.sum_slice(third);
        multiplier.sum_slice(fourth);
        add(third, fourth);
        add(sums, third);
    }
}

// Sums of nodes that wait, of this thread alone.
struct Waiting {
    u32 kept;
    float* deep;

    template <int PLACE>
    __device__ __forceinline__ float4* deep_place(int i) const {
        return (float4*)deep + ((PLACE - KEPT) * TILE_SUMS + i) / 4 * (GROUPS * GROUP_THREADS) + threadIdx.x;
    }

    __device__ __forceinline__ u32 kept_place(int i) const { return kept + threadIdx.x * 16 + i * PLACE_BYTES; }

    template <int PLACE>
    __device__ __forceinline__ void put(const float* sums) const {
#pragma unroll
        for (int i = 0; i < TILE_SUMS; i += 4) {
            if constexpr (PLACE < KEPT)
                asm volatile("st.shared::cta.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(kept_place(i)), "f"(sums[i]),
                             "f"(sums[i + 1]), "f"(sums[i + 2]), "f"(sums[i + 3])
                             : "memory");
            else
                *deep_place<PLACE>(i) = make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
        }
    }

    template <int PLACE>
    __device__ __forceinline__ void add_to(float* sums) const {
#pragma unroll
        for (int i = 0; i < TILE_SUMS; i += 4) {
            float4 got;
            if constexpr (PLACE < KEPT)
                asm volatile("ld.shared::cta.v4.f32 {%0, %1, %2, %3}, [%4];"
                             : "=f"(got.x), "=f"(got.y), "=f"(got.z), "=f"(got.w)
                             : "r"(kept_place(i))
                             : "memory");
            else
                got = *deep_place<PLACE>(i);
            sums[i] += got.x, sums[i + 1] += got.y, sums[i + 2] += got.z, sums[i + 3] += got.w;
        }
    }

    // Puts the sum of a node into the counter. The last one is added to all that wait: the smallest first, as the tree
    // has it.
    template <int PLACE = 0>
    __device__ __forceinline__ void count(float* sums, int node) const {
        if constexpr (PLACE < PLACES) {
            bool taken = node >> PLACE & 1, last = node == NODES - 1;
            bool comes = ((node + 1) & ((1 << PLACE) - 1)) == 0;  // all places below were taken
            if (taken && (comes || last)) add_to<PLACE>(sums);
            if (!taken && comes && !last) put<PLACE>(sums);
            count<PLACE + 1>(sums, node);
        }
    }
};

template <class Multiplier>
__device__ __forceinline__ void sum_slices(float (&sums)[ROW_BLOCKS][SUMS], Multiplier& multiplier,
                                           const Waiting& waiting) {
#pragma unroll 1  // else sums of the next node would take registers beside these
    for (int node = 0; node < NODES; ++node) {
        sum_node(sums, multiplier);
        waiting.count(&sums[0][0], node);
    }
}
