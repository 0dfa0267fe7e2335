// Blocks of a GGUF file in our tiles, bit by bit: docs/layouts.md, GGUF formats.
#pragma once
#include <cstdint>

#include "formats.h"

namespace ktg {

// A GGUF tensor's bytes; a row is its blocks in column order.
struct FileRows {
  const uint8_t* data;
  long rows, row_bytes;
};

// Throws std::invalid_argument for other sizes, and for a scale that is inf or NaN.
void repack_matrix(const WeightArg& w, char* stack, long index, const FileRows& src);
// The f32 values [rows, cols] of a packed matrix, as the gguf package computes them.
void unpack_blocks(const WeightArg& w, const char* stack, long index, float* dst);

// What a block of the file is, and the values it holds.
struct FileBlock {
  long columns, bytes;
  long scales[2];  // where its f16 scales lie; -1: none
  void (*values)(const uint8_t* block, float* out);
};
const FileBlock& file_block(int format);
float half_value(const uint8_t* at);

}  // namespace ktg
