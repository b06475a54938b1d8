// The warp groups that multiply, and sums in slices: each slice from zero, then the slices in the tree of
// quire/kernels/slices.py, which depends on their number alone.
//
// Where the tree is kept: INNER slices add up in registers (of four, two sums wait beside the one that grows; where a
// sum takes too many registers, of two or none). Sums of nodes wait in a binary counter, whose first place is in shared
// memory with KEPT and whose others are in memory of the block's own: the longer a sum, the more rarely it is put away.
// Every thread puts away and takes back its own sums, so nobody waits for anybody.
//
// ORDERED: a slice of one head is two turns. If both warp groups ended it at once, the tensor cores would rest while
// both add; so a group begins its slice when the other has issued all of its own. In a long slice the second group is
// LEAD turns behind the first.

constexpr int bits_of(int value) { return value ? 1 + bits_of(value / 2) : 0; }
constexpr int PLACES = bits_of(NODES - 1);
constexpr int DEEP_PLACES = PLACES > KEPT ? PLACES - KEPT : 0;
constexpr int DEEP_SUMS = DEEP_PLACES * TILE_SUMS * GROUPS * GROUP_THREADS;

static_assert(SLICES == 1 || SLICE_TURNS > 0, "a slice has no turns");
constexpr bool SHORT = SLICE_TURNS <= 4;
constexpr int LEAD = ORDERED && !SHORT ? (STAGES + 1) / 3 : 0;

static_assert(!ORDERED || (SLICES > 1 && (SHORT ? SLICE_TURNS <= STAGES : SLICE_TURNS >= STAGES)), "no such order");
static_assert(TILE_SUMS % 4 == 0 || PLACES == 0, "sums are put away in fours");

// Sums are there from here on: the compiler must not read them before the wait.
__device__ __forceinline__ void arrived(float (&sums)[ROW_BLOCKS][SUMS]) {
#pragma unroll
    for (int i = 0; i < TILE_SUMS; ++i) asm volatile("" : "+f"((&sums[0][0])[i])::"memory");
}

struct Multiplier {
    u32 ring;
    Barriers& barriers;
    const Block& block;
    int group;
    Turn now;
    u32 turn_of_mine;  // phase of the barrier that says so

    __device__ __forceinline__ Multiplier(u32 ring, Barriers& barriers, const Block& block, int group)
        : ring(ring), barriers(barriers), block(block), group(group), turn_of_mine(1 - group) {}

    __device__ __forceinline__ void release(int stage) const {
        int lane = threadIdx.x % 32;
        if constexpr (SHARING > 1)
            arrive_in(&barriers.free[stage], block.first + lane, lane < SHARING);
        else
            arrive(&barriers.free[stage], lane == 0);
    }

    // The products of one turn, added to the sums or, of the first one, in their place.
    template <bool FIRST>
    __device__ __forceinline__ void issue(float (&sums)[ROW_BLOCKS][SUMS], int stage) const {
        u64 rows = operand(ring + stage * STAGE_BYTES + group * ROW_BLOCKS * BLOCK_BYTES);
        u64 features = operand(ring + stage * STAGE_BYTES + X_BYTES);
#pragma unroll
        for (int step = 0; step < COLUMNS / 16; ++step) {
#pragma unroll
            for (int each = 0; each < ROW_BLOCKS; ++each) {  // an address counts 16 bytes; a step is 32 of a row
                u64 row = rows + each * (BLOCK_BYTES / 16) + 2 * step;
                if (FIRST && step == 0)
                    multiply_first(sums[each], row, features);
                else
                    multiply(sums[each], row, features + 2 * step);
            }
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    }

    // The second group waits until the first has issued LEAD turns of a slice. Without a phase that is over twice: the
    // first cannot be a slice ahead, since no ring is longer than a slice.
    __device__ __forceinline__ void keep_behind() {
        if (group == 1) wait_for(&barriers.order[1], turn_of_mine);
        turn_of_mine ^= 1;
    }

    __device__ __forceinline__ void tell_behind(int turn) const {
        arrive(&barriers.order[1], group == 0 && turn == LEAD - 1 && threadIdx.x % 32 == 0);
    }

    // Sums over the next turns, from zero.
    __device__ __forceinline__ void sum(float (&sums)[ROW_BLOCKS][SUMS], int turns) {
        wait_for(&barriers.full[now.stage], now.phase);
        if (LEAD) keep_behind();
        begin_products();
        issue<true>(sums, now.stage);
        if (LEAD) tell_behind(0);
        int before = now.stage;
        now.next();
        for (int turn = 1; turn < turns; ++turn, now.next()) {
            wait_for(&barriers.full[now.stage], now.phase);
            begin_products();
            issue<false>(sums, now.stage);
            if (LEAD) tell_behind(turn);
            wait_for_products<1>();
            release(before);
            before = now.stage;
        }
        wait_for_products<0>();
        arrived(sums);
        release(before);
    }

    // The same for one short slice, when the other group has issued its own.
    __device__ __forceinline__ void sum_in_order(float (&sums)[ROW_BLOCKS][SUMS]) {
        int stages[SLICE_TURNS];
#pragma unroll
        for (int turn = 0; turn < SLICE_TURNS; ++turn, now.next()) {
            stages[turn] = now.stage;
            wait_for(&barriers.full[now.stage], now.phase);
        }
        wait_for(&barriers.order[group], turn_of_mine);
        turn_of_mine ^= 1;
        begin_products();
        issue<true>(sums, stages[0]);
#pragma unroll
        for (int turn = 1; turn < SLICE_TURNS; ++turn) issue<false>(sums, stages[turn]);
        arrive(&barriers.order[1 - group], threadIdx.x % 32 == 0);
        wait_and_release<0>(stages);
        arrived(sums);
    }

    template <int TURN>
    __device__ __forceinline__ void wait_and_release(int (&stages)[SLICE_TURNS]) {
        wait_for_products<SLICE_TURNS - 1 - TURN>();
        release(stages[TURN]);
        if constexpr (TURN + 1 < SLICE_TURNS) wait_and_release<TURN + 1>(stages);
    }

    __device__ __forceinline__ void sum_slice(float (&sums)[ROW_BLOCKS][SUMS]) {
        if constexpr (ORDERED && SHORT) {
            sum_in_order(sums);
        } else {
            sum(sums, SLICE_TURNS);
        }
    }
};

__device__ __forceinline__ void add(float (&sums)[ROW_BLOCKS][SUMS], const float (&others)[ROW_BLOCKS][SUMS]) {
#pragma unroll
    for (int i = 0; i < TILE_SUMS; ++i) (&sums[0][0])[i] += (&others[0][0])[i];
}

// The node over the next INNER slices.
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

__device__ __forceinline__ void sum_slices(float (&sums)[ROW_BLOCKS][SUMS], Multiplier& multiplier,
                                           const Waiting& waiting) {
#pragma unroll 1  // else sums of the next node would take registers beside these
    for (int node = 0; node < NODES; ++node) {
        sum_node(sums, multiplier);
        waiting.count(&sums[0][0], node);
    }
}
