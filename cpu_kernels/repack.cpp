#include "repack.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace ktg {

namespace {

constexpr long kMaxRecord = 53 * 4;  // bytes of one row in the longest record

// The part of a record that one row has: its words in order. A record of 32-column formats holds
// two blocks, with both scales in the first word; a superblock is a record as it is. What is
// missing (padding) is zero: so are its scales, and its values.
void gather(const FileBlock& b, const uint8_t* blocks, long count, uint8_t* words) {
  std::memset(words, 0, kMaxRecord);
  if (b.columns != 32) {
    if (count) std::memcpy(words, blocks, b.bytes);
    return;
  }
  for (long i = 0; i < count; ++i) {
    std::memcpy(words + 2 * i, blocks + i * b.bytes, 2);
    std::memcpy(words + 4 + i * (b.bytes - 2), blocks + i * b.bytes + 2, b.bytes - 2);
  }
}

// The other way: block `i` of a record.
void scatter(const FileBlock& b, const uint8_t* words, long i, uint8_t* block) {
  if (b.columns != 32) {
    std::memcpy(block, words, b.bytes);
    return;
  }
  std::memcpy(block, words + 2 * i, 2);
  std::memcpy(block + 2, words + 4 + i * (b.bytes - 2), b.bytes - 2);
}

// The logical row at a place, or -1: padding.
long row_at(const WeightArg& w, long tile, long lane) {
  const long half = w.gate_up ? w.rows / 2 : w.rows, part = w.gate_up ? tile % 2 : 0;
  const long in_part = (w.gate_up ? tile / 2 : tile) * kTileRows + lane;
  return in_part < half ? part * half + in_part : -1;
}

bool finite_scales(const FileBlock& b, const uint8_t* row, long blocks) {
  for (long i = 0; i < blocks; ++i)
    for (long at : b.scales)
      if (at >= 0 && (row[i * b.bytes + at + 1] & 0x7C) == 0x7C) return false;
  return true;
}

void check(const WeightArg& w, long index, const FileBlock& b, const FileRows& src) {
  const auto pair = [](long a, long c) {
    return "[" + std::to_string(a) + ", " + std::to_string(c) + "]";
  };
  const std::string name = format_name(w.format);
  if (!from_gguf(w.format))
    throw std::invalid_argument("repack: " + name + " is no GGUF format; use pack_into");
  if (index < 0 || index >= w.count)
    throw std::invalid_argument("repack: index " + std::to_string(index) + " of a stack of " +
                                std::to_string(w.count));
  const long row_bytes = w.cols / b.columns * b.bytes;
  if (src.rows != w.rows || src.row_bytes != row_bytes)
    throw std::invalid_argument("repack: " + name + " " + pair(w.rows, w.cols) + " has the bytes " +
                                pair(w.rows, row_bytes) + ", got " + pair(src.rows, src.row_bytes));
  for (long r = 0; r < w.rows; ++r)
    if (!finite_scales(b, src.data + r * row_bytes, w.cols / b.columns))
      throw std::invalid_argument("repack: row " + std::to_string(r) +
                                  " has a block whose scale is inf or NaN");
}

}  // namespace

void repack_matrix(const WeightArg& w, char* stack, long index, const FileRows& src) {
  const FileBlock& b = file_block(w.format);
  check(w, index, b, src);
  char* out = stack + index * w.stride;
  std::memset(out + w.scale_offset, 0, w.stride - w.scale_offset);
  const long per_record = w.step / b.columns, blocks = w.cols / b.columns;
  for (long tile = 0; tile < w.tiles; ++tile)
    for (long i = 0; i < blocks; i += per_record) {
      uint8_t words[kTileRows][kMaxRecord];
      const long here = blocks - i < per_record ? blocks - i : per_record;
      for (long lane = 0; lane < kTileRows; ++lane) {
        const long row = row_at(w, tile, lane);
        const uint8_t* at = src.data + (row < 0 ? 0 : row) * src.row_bytes + i * b.bytes;
        gather(b, at, row < 0 ? 0 : here, words[lane]);
      }
      for (long line = 0; line < w.lines; ++line, out += kBlockBytes)
        for (long lane = 0; lane < kTileRows; ++lane)
          std::memcpy(out + 4 * lane, words[lane] + 4 * line, 4);
    }
}

void unpack_blocks(const WeightArg& w, const char* stack, long index, float* dst) {
  const FileBlock& b = file_block(w.format);
  const long per_record = w.step / b.columns;
  for (long tile = 0; tile < w.tiles; ++tile)
    for (long lane = 0; lane < kTileRows; ++lane) {
      const long row = row_at(w, tile, lane);
      if (row < 0) continue;
      const char* at = stack + index * w.stride + tile * w.tile_bytes + 4 * lane;
      for (long k = 0; k < w.cols; k += b.columns) {
        uint8_t words[kMaxRecord], block[kMaxRecord];
        const char* record = at + k / w.step * w.lines * kBlockBytes;
        for (long line = 0; line < w.lines; ++line)
          std::memcpy(words + 4 * line, record + line * kBlockBytes, 4);
        scatter(b, words, k / b.columns % per_record, block);
        b.values(block, dst + row * w.cols + k);
      }
    }
}

}  // namespace ktg
