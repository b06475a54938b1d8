// What few_gemm.cu says to the hardware: loads and products, each one instruction.

// A weight, which nobody reads again: past the first cache, whose place is for the rows. Not by the path for constants
// (.nc): the compiler moved such loads behind the wait for the previous kernel.
__device__ __forceinline__ uint4 load_once(const u16* place, u64 policy) {
    uint4 words;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(place), "l"(policy)
                 : "memory");
    return words;
}

// Of a row, through the first cache: many warps read it. Zeros where nothing is `real`. Not before the wait for the
// previous kernel, which makes what it wrote visible.
__device__ __forceinline__ uint4 load_row(const u16* place, bool real) {
    uint4 words;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
        "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(words.x), "=&r"(words.y), "=&r"(words.z), "=&r"(words.w)
        : "l"(place), "r"((u32)real)
        : "memory");
    return words;
}

// 16 rows by 8 features, 16 columns deep.
__device__ __forceinline__ void multiply(float (&sums)[4], u32 first, u32 second, u32 third, u32 fourth, u32 low,
                                         u32 high) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(first), "r"(second), "r"(third), "r"(fourth), "r"(low), "r"(high));
}

// Two bf16 products, each rounded once.
__device__ __forceinline__ u32 multiply_pair(u32 one, u32 other) {
    u32 both;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(one), "r"(other));
    return both;
}
