// What this CPU can do at most, measured natively: reading memory, and arithmetic by instruction
// set. Plain data only: units of cpu_kernels/limits/ include this header (see formats.h).
#pragma once
#include <cstddef>

namespace ktg {

// Reads [data, data + bytes), a multiple of 1024 bytes, 64-byte aligned; returns some function of
// them.
using ReadLoop = long (*)(const char* data, size_t bytes);

// Does `rounds` rounds of independent multiply-adds in registers; returns the operations done
// (a multiply and an add are two).
using ArithmeticLoop = double (*)(long rounds);

// One unit's loops. Call them only where the CPU has the unit's instructions.
namespace avx2_limits {
long read(const char* data, size_t bytes);
double f32(long rounds);
}  // namespace avx2_limits
namespace avx512_limits {
long read(const char* data, size_t bytes);
double f32(long rounds);
}  // namespace avx512_limits
namespace avx512_vnni_limits {
double int8(long rounds);
}  // namespace avx512_vnni_limits
namespace avx512_bf16_limits {
double bf16(long rounds);
}  // namespace avx512_bf16_limits
namespace avx512_amx_limits {
double int8(long rounds);  // the thread needs permission to use tiles
double bf16(long rounds);
double int8_loaded(long rounds);  // operands come from the first-level cache
double bf16_loaded(long rounds);
}  // namespace avx512_amx_limits

}  // namespace ktg
