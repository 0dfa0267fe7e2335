// Packed weight formats: docs/layouts.md. Plain data only: ISA units include this header, and an
// inline function here would become a weak symbol that the linker may take from the AVX-512 unit.
#pragma once
#include <cstdint>

namespace ktg {

enum Format : int { FMT_F32 = 0, FMT_BF16, FMT_INT8, FMT_INT4 };

constexpr long kTileRows = 16;    // output rows per tile, one per vector lane
constexpr long kBlockBytes = 64;  // every format: 16 rows x `step` columns

// A packed matrix, or a stack of `count` of them. Memory is owned by Python.
struct WeightArg {
  const char* data;
  int format;
  bool gate_up;
  long rows, cols, count, group;
  long tiles;         // per matrix, padding included
  long step;          // columns per block
  long kpad;          // cols rounded up to step
  long groups;        // int4 scale groups per row
  long tile_bytes;    // data bytes of one tile
  long scale_offset;  // from the start of a matrix
  long stride;        // bytes between matrices of the stack
};

// Fills the derived fields; returns nullptr or what is wrong.
const char* describe_weight(const char* format, long rows, long cols, long count, long group,
                            bool gate_up, WeightArg* out);
const char* format_name(int format);

}  // namespace ktg
