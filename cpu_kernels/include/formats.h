// Packed weight formats: docs/layouts.md. Plain data only: ISA units include this header, and an
// inline function here would become a weak symbol that the linker may take from the AVX-512 unit.
#pragma once
#include <cstdint>

namespace ktg {

enum Format : int {
  FMT_F32 = 0,
  FMT_BF16,
  FMT_INT8,
  FMT_INT4,
  FMT_INT4P,
  FMT_INT8G,  // "int8" with a group
  FMT_INT4Z,
  FMT_MXFP4,
  FMT_F16,
  FMT_FP8,
  FMT_Q4_0,  // from here on: blocks of a GGUF file (repack.h)
  FMT_Q8_0,
  FMT_Q4_K,
  FMT_Q5_K,
  FMT_Q6_K,
  FMT_IQ4_XS,
};

// As what a kernel takes the rows it multiplies with a weight. int8: one scale per row and
// kActBlock columns. bf16: on tile hardware and for many rows; f32 otherwise.
enum Activations : int { ACTS_F32 = 0, ACTS_BF16, ACTS_INT8 };

constexpr long kTileRows = 16;    // output rows per tile, one per vector lane
constexpr long kBlockBytes = 64;  // every format: 16 rows x `step` columns
constexpr long kActBlock = 256;   // columns of an int8 row that share a scale

// A packed matrix, or a stack of `count` of them. Memory is owned by Python.
struct WeightArg {
  const char* data;
  int format;
  bool gate_up;
  int activations;
  long rows, cols, count, group;
  long tiles;         // per matrix, padding included
  long step;          // columns per block; of GGUF formats: per record of `lines` blocks
  long lines;         // 1, or blocks of a record
  long kpad;          // cols rounded up to whole tile operands
  long groups;        // scale groups per row
  long tile_bytes;    // data bytes of one tile
  long scale_offset;  // from the start of a matrix: scales of rows or groups
  long outer_offset;  // a second table: scales of rows behind factors of groups (int4p); zeros
                      // (int4z)
  long stride;        // bytes between matrices of the stack
  // Rows from which the kernel works on panels or tiles (integers) or takes bf16 rows; 0 until the
  // weight joins a plan: the level's default. bf16 rows change bits, so there the plan's shapes
  // decide, by the tokens of a call with so many rows for each expert.
  long many_rows, many_tokens;
};

// Fills the derived fields; returns nullptr or what is wrong.
const char* describe_weight(const char* format, long rows, long cols, long count, long group,
                            bool gate_up, WeightArg* out);
const char* format_name(int format);
bool has_integers(int format);  // takes rows of 8-bit integers
bool from_gguf(int format);
// nullptr, or why these rows cannot meet this format.
const char* set_activations(const char* name, WeightArg* w);

}  // namespace ktg
