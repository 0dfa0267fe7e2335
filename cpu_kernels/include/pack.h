// Packing, and unpacking for tests: docs/layouts.md.
#pragma once
#include <cstdint>
#include <vector>

#include "formats.h"
#include "plan.h"

namespace ktg {

// A dense source matrix; rows `stride` elements apart.
struct Source {
  const char* data;
  int dtype;
  long rows, cols, stride;
};

void pack_matrix(const IsaTable& isa, const WeightArg& w, char* stack, long index,
                 const Source& src);
// What a checkpoint already holds, row-major: integers (int8, int4; int4z and mxfp4: 0..15; fp8:
// bytes) as 8 bits, scales [rows, groups] and, of int4z, zero points.
struct Given {
  const uint8_t* q;
  long rows, cols;
  const float* scales;
  long scale_rows, scale_cols;
  const uint8_t* zeros;  // as many as scales, or null
};
// Throws where a format cannot keep a value or a scale exactly.
void pack_ints(const WeightArg& w, char* stack, long index, const Given& given);

float f16_value(uint16_t bits);
uint16_t f16_bits(float v);  // nearest, for values that f16 has; others come out as something else

// Integer values (int8, int4) or zeros, and scales as f32; row-major, padding left out.
void read_quantized(const WeightArg& w, const char* stack, long index, int8_t* q, float* scales);
void unpack_matrix(const WeightArg& w, const char* stack, long index, float* dst);

}  // namespace ktg
