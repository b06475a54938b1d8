// Numbers of 16 bits and words that hold two, as the chip makes them; for harnesses that run a kernel on a CPU.
#pragma once
#include <cstring>

using u32 = unsigned;

static float __uint_as_float(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static u32 __float_as_uint(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}
static float low_of(u32 both) { return __uint_as_float(both << 16); }
static float high_of(u32 both) { return __uint_as_float(both & 0xffff0000u); }
static u32 narrow(float value) {
    u32 bits = __float_as_uint(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static u32 packed(float low, float high) { return narrow(low) | narrow(high) << 16; }
