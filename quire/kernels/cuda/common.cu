// What kernels in CUDA C share: barriers in shared memory, an exchange of words, the wait for the previous kernel.
//
// Defined in front of it: EARLY (started while the previous kernel runs), WATCHED (an endless wait is an error).

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

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

// One arrival of every thread for which `here` is true. No branch: around branches the compiler finds fewer registers.
__device__ __forceinline__ void arrive(u64* barrier, bool here) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(
                     shared_address(barrier)),
                 "r"((u32)here)
                 : "memory");
}

__device__ __forceinline__ u64 read_once_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// The next kernel may start as soon as every thread block has said so or has ended.
__device__ __forceinline__ void launch_next_kernel() {
    if (EARLY) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void wait_for_previous_kernel() {
    if (EARLY) asm volatile("griddepcontrol.wait;" ::: "memory");
}

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
