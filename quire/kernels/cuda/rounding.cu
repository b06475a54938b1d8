// Rounding to bf16, and a gate that rounds as kernels one by one do.

typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 packed(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float low_of(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high_of(u32 both) { return __uint_as_float(both & 0xffff0000u); }
__device__ __forceinline__ float rounded(float value) { return low_of(packed(value, value)); }

// Operation by operation what `activation.act_mul` makes of the rounded sums.
__device__ __forceinline__ float rounded_gate(float gate, float up) {
    float product;
    asm("{\n.reg .f32 a;\n"
        "sub.f32 a, 0f00000000, %1;\nmul.f32 a, a, 0f3FB8AA3B;\nex2.approx.f32 a, a;\nadd.f32 a, a, 0f3F800000;\n"
        "div.full.f32 a, %1, a;\nmul.f32 %0, a, %2;\n}"
        : "=f"(product)
        : "f"(rounded(gate)), "f"(rounded(up)));
    return product;
}
