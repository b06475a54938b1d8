// The warp groups that multiply.
//
// ORDERED: a slice of one head is two turns. If both warp groups ended it at once, the tensor cores would rest while
// both add; so a group begins its slice when the other has issued all of its own. In a long slice the second group is
// LEAD turns behind the first.

static_assert(SLICES == 1 || SLICE_TURNS > 0, "a slice has no turns");
constexpr bool SHORT = SLICE_TURNS <= 4;
constexpr int LEAD = ORDERED && !SHORT ? (STAGES + 1) / 3 : 0;

static_assert(!ORDERED || (SLICES > 1 && (SHORT ? SLICE_TURNS <= STAGES : SLICE_TURNS >= STAGES)), "no such order");

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
