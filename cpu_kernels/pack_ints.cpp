// Packs integers and scales that a checkpoint already holds: nothing is rounded.
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "pack.h"

namespace ktg {

namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("pack_ints: " + what);
}
std::string at(long row, long column) {
  return " at row " + std::to_string(row) + ", column " + std::to_string(column);
}
uint32_t bits_of(float v) {
  uint32_t u;
  std::memcpy(&u, &v, 4);
  return u;
}

// Writes the scale of a place as the format keeps it; false if it cannot keep it exactly.
bool put_scale(int format, float v, char* scales, long place) {
  const uint32_t bits = bits_of(v);
  if (!std::isfinite(v)) return false;
  if (format == FMT_INT8 || format == FMT_INT8G || format == FMT_FP8) {
    std::memcpy(scales + 4 * place, &v, 4);
    return true;
  }
  if (format == FMT_MXFP4) {  // 2^(code - 127); 2^-127 is denormal in f32
    scales[place] = char(bits >> 23);
    return bits == 0x400000 || (bits << 9 == 0 && bits >> 23 >= 1 && bits >> 23 <= 254);
  }
  const bool half = format == FMT_INT4Z;
  if (half && std::fabs(v) > 65504.0f) return false;
  const uint16_t kept = half ? f16_bits(v) : uint16_t(bits >> 16);
  std::memcpy(scales + 2 * place, &kept, 2);
  return bits == (half ? bits_of(f16_value(kept)) : uint32_t(kept) << 16);
}

struct Range {
  int low, high;
};
Range range_of(int format) {
  if (format == FMT_INT8 || format == FMT_INT8G) return {-128, 127};
  return format == FMT_INT4 ? Range{-8, 7} : Range{0, 15};
}

// One value as its format stores it: a byte, or a nibble.
uint8_t stored(const WeightArg& w, const Given& g, long row, long k) {
  const uint8_t byte = g.q[row * w.cols + k];
  if (w.format == FMT_FP8) {
    if ((byte & 0x7F) == 0x7F) refuse("NaN" + at(row, k));
    return byte;
  }
  const Range range = range_of(w.format);
  const int value = range.low < 0 ? int8_t(byte) : byte;
  if (value < range.low || value > range.high)
    refuse(std::to_string(value) + at(row, k) + "; " + format_name(w.format) + " holds " +
           std::to_string(range.low) + " to " + std::to_string(range.high));
  return uint8_t(w.format == FMT_INT4 ? value + 8 : value);
}

long given_groups(const WeightArg& w) { return w.group ? (w.cols + w.group - 1) / w.group : 1; }

// What padding holds, so that it means 0: int4's 8, int4z's zero point of the group.
uint8_t padding(const WeightArg& w, const Given& g, long row, long k) {
  if (w.format == FMT_INT4) return 8;
  const bool has_zero = w.format == FMT_INT4Z && row >= 0 && k / w.group < given_groups(w);
  return has_zero ? g.zeros[row * given_groups(w) + k / w.group] : 0;
}

// The columns of one row, word by word. row -1 is padding.
void put_row(const WeightArg& w, const Given& g, long row, char* words) {
  for (long k0 = 0; k0 < w.kpad; k0 += w.step, words += kBlockBytes) {
    uint32_t word = 0;
    for (long i = 0; i < w.step; ++i) {
      const bool there = row >= 0 && k0 + i < w.cols;
      // A zero point of 16 leaves int4z no nibble that means 0; rows of x are 0 there.
      const uint32_t v = (there ? stored(w, g, row, k0 + i) : padding(w, g, row, k0 + i)) &
                         (w.step == 8 ? 15 : 255);
      word |= v << (i < 4 ? 8 * i : 8 * (i - 4) + 4);
    }
    std::memcpy(words, &word, 4);
  }
}

void put_scales(const WeightArg& w, const Given& g, char* matrix, long tile, long lane, long row) {
  for (long i = 0; i < given_groups(w); ++i) {
    const long place = w.group ? (tile * w.groups + i) * kTileRows + lane : tile * kTileRows + lane;
    const float scale = g.scales[row * given_groups(w) + i];
    if (!put_scale(w.format, scale, matrix + w.scale_offset, place))
      refuse("the scale " + std::to_string(scale) + " of row " + std::to_string(row) + ", group " +
             std::to_string(i) + " cannot be kept exactly in " + format_name(w.format));
    if (w.format != FMT_INT4Z) continue;
    const uint8_t zero = g.zeros[row * given_groups(w) + i];
    if (zero > 16)
      refuse("the zero point " + std::to_string(zero) + " of row " + std::to_string(row) +
             "; int4z holds 0 to 16");
    matrix[w.outer_offset + place] = char(zero);
  }
}

void check(const WeightArg& w, long index, const Given& g) {
  const auto pair = [](long a, long b) {
    return "[" + std::to_string(a) + ", " + std::to_string(b) + "]";
  };
  if (!(has_integers(w.format) || w.format == FMT_FP8) || w.format == FMT_INT4P)
    refuse(std::string(format_name(w.format)) + " is packed from floats: pack_into");
  if (index < 0 || index >= w.count)
    refuse("index " + std::to_string(index) + " of a stack of " + std::to_string(w.count));
  if (g.rows != w.rows || g.cols != w.cols)
    refuse("the integers are " + pair(g.rows, g.cols) + ", the weight " + pair(w.rows, w.cols));
  if (g.scale_rows != w.rows || g.scale_cols != given_groups(w))
    refuse("the scales are " + pair(g.scale_rows, g.scale_cols) + ", expected " +
           pair(w.rows, given_groups(w)));
  if ((w.format == FMT_INT4Z) != (g.zeros != nullptr))
    refuse(w.format == FMT_INT4Z ? "int4z needs zero points" : "only int4z has zero points");
}

}  // namespace

void pack_ints(const WeightArg& w, char* stack, long index, const Given& given) {
  check(w, index, given);
  char* matrix = stack + index * w.stride;
  std::memset(matrix + w.scale_offset, 0, w.stride - w.scale_offset);
  for (long tile = 0; tile < w.tiles; ++tile) {
    const long half = w.gate_up ? w.rows / 2 : w.rows;  // rows of one part
    const long part = w.gate_up ? tile % 2 : 0, first = (w.gate_up ? tile / 2 : tile) * kTileRows;
    for (long lane = 0; lane < kTileRows; ++lane) {
      const long row = first + lane < half ? part * half + first + lane : -1;
      put_row(w, given, row, matrix + tile * w.tile_bytes + 4 * lane);
      if (row >= 0) put_scales(w, given, matrix, tile, lane, row);
    }
  }
}

}  // namespace ktg
