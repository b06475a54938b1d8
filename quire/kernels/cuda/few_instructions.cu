// What few_gemm.cu says to the hardware: copies, operands and products, each one instruction.

__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void expect_bytes(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// By the copy engine; the barrier counts the bytes.
__device__ __forceinline__ void copy_bytes(u32 to, const u16* from, u32 bytes, u64* barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}

// Zeros where nothing is `real`. Past the first cache, which may hold what was there before the previous kernel ended.
__device__ __forceinline__ uint4 load_words(const u16* place, bool real = true) {
    uint4 words;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
        "@p ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(words.x), "=&r"(words.y), "=&r"(words.z), "=&r"(words.w)
        : "l"(place), "r"((u32)real)
        : "memory");
    return words;
}

// 16 features by 16 columns of a stage, as the tensor cores' first operand.
__device__ __forceinline__ uint4 read_weights(u32 place) {
    uint4 words;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(place)
                 : "memory");
    return words;
}

// 16 features by 8 rows, 16 columns deep.
__device__ __forceinline__ void multiply(float (&sums)[4], uint4 weights, u32 low, u32 high) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(weights.x), "r"(weights.y), "r"(weights.z), "r"(weights.w), "r"(low), "r"(high));
}
