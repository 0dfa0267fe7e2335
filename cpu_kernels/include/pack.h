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
// Integer values (int8, int4) or zeros, and scales as f32; row-major, padding left out.
void read_quantized(const WeightArg& w, const char* stack, long index, int8_t* q, float* scales);
void unpack_matrix(const WeightArg& w, const char* stack, long index, float* dst);

}  // namespace ktg
