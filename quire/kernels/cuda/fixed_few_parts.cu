// What fixed_few.cu needs of the chip: barriers, copies, one tensor core instruction. Its test puts others in their place.

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void init_barrier(u32 barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

// The copy engine sees the barriers from here on.
__device__ __forceinline__ void show_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void expect_bytes(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// WATCHED: so many tries in vain are an error.
__device__ __forceinline__ void wait_for(u32 barrier) {
    for (u32 tries = 0, over = 0; !over; ++tries) {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(over)
            : "r"(barrier)
            : "memory");
        if (WATCHED && tries > 1u << 22) __trap();
    }
}

// Read once a step: the cache may forget it first.
__device__ __forceinline__ void copy_weights(u32 to, const void* from, int bytes, u32 barrier) {
    asm volatile(
        "{\n.reg .b64 policy;\n"
        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
        "policy;\n}" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void let_next_kernel_start() {
    if (EARLY) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void wait_for_previous_kernel() {
    if (EARLY) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Four matrices of 8 x 8 that lie side by side: each lane names a row of one of them.
__device__ __forceinline__ void load_matrices(u32 (&words)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(from)
                 : "memory");
}

// Eight rows (the other eight are nobody's) by eight features, 16 columns deep. On Hopper it adds as the instruction of
// a warp group does: all 16 products and the sum before at once.
__device__ __forceinline__ void multiply(float (&sums)[4], u32 row, u32 row_behind, u32 feature, u32 feature_behind) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %5}, {%7, %8}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(row), "r"(0), "r"(row_behind), "r"(feature), "r"(feature_behind));
}

__device__ __forceinline__ float inverse_root(float value) {
    float root;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(value));
    return root;
}
