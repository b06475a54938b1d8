// What attention_cluster.cu says to the hardware beside few_instructions.cu: each one instruction.

extern __shared__ __align__(16) unsigned char dynamic_memory[];
__device__ __forceinline__ unsigned char* block_memory() { return dynamic_memory; }

// What earlier kernels than the previous one wrote, before the wait for that; zeros where nothing is `real`.
__device__ __forceinline__ uint4 load_early(const u16* place, bool real) { return load_row(place, real); }

__device__ __forceinline__ float4 load_floats(const float* place) {
    float4 found;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(found.x), "=f"(found.y), "=f"(found.z), "=f"(found.w)
                 : "l"(place)
                 : "memory");
    return found;
}

__device__ __forceinline__ int load_number(const int* place) {
    int found;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(found) : "l"(place) : "memory");
    return found;
}

__device__ __forceinline__ float lowest() { return __uint_as_float(0xff800000u); }  // minus infinity

__device__ __forceinline__ float power_of_two(float exponent) {
    float found;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(exponent));
    return found;
}

// Eight rows of eight halves: lane i has two neighbours of row i / 4, and gets two of column i / 4.
__device__ __forceinline__ u32 transposed(u32 word) {
    u32 found;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(word));
    return found;
}

__device__ __forceinline__ u32 low_halves(u32 one, u32 other) { return __byte_perm(one, other, 0x5410); }
__device__ __forceinline__ u32 high_halves(u32 one, u32 other) { return __byte_perm(one, other, 0x7632); }

__device__ __forceinline__ uint4 from_lane(const uint4& words, int lane) {
    return {__shfl_sync(~0u, words.x, lane), __shfl_sync(~0u, words.y, lane), __shfl_sync(~0u, words.z, lane),
            __shfl_sync(~0u, words.w, lane)};
}

// All threads of the cluster's blocks arrive, and then wait: what they stored before is there.
__device__ __forceinline__ void arrive_at_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// To the same place in the shared memory of a block of the cluster.
__device__ __forceinline__ void store_at(int block, float* place, float4 numbers) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(place)), "r"(block));
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(there), "f"(numbers.x), "f"(numbers.y),
                 "f"(numbers.z), "f"(numbers.w)
                 : "memory");
}
