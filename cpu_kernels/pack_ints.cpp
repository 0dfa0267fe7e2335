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

long given_groups(const WeightArg& w) { return w.group ? (w.cols + w.group - 1) / w.group : 1; }

// The first column whose value the format does not hold, or -1. int8 holds all.
long first_bad(const WeightArg& w, const uint8_t* q) {
  const bool is_fp8 = w.format == FMT_FP8, has_nibbles = w.step == 8;
  const int offset = w.format == FMT_INT4 ? 8 : 0;
  for (long k = 0; k < w.cols; ++k) {
    const bool bad = is_fp8 ? (q[k] & 0x7F) == 0x7F : has_nibbles && uint8_t(q[k] + offset) > 15;
    if (bad) return k;
  }
  return -1;
}

void check_row(const WeightArg& w, const uint8_t* q, long row) {
  const long k = first_bad(w, q);
  if (k < 0) return;
  const std::string place = at(row, k);
  if (w.format == FMT_FP8) refuse("NaN" + place);
  const bool is_signed = w.format == FMT_INT4;
  refuse(std::to_string(is_signed ? int(int8_t(q[k])) : int(q[k])) + place + "; " +
         format_name(w.format) + (is_signed ? " holds -8 to 7" : " holds 0 to 15"));
}

// One row of kpad bytes; beyond cols they mean 0. A zero point of 16 leaves int4z no nibble that
// does, but rows of x are 0 there. row -1 is padding.
void fill_row(const WeightArg& w, const Given& g, long row, uint8_t* bytes) {
  std::memset(bytes, 0, w.kpad);
  if (row < 0) return;
  const uint8_t* q = g.q + row * w.cols;
  check_row(w, q, row);
  std::memcpy(bytes, q, w.cols);
  if (w.format != FMT_INT4Z) return;
  const long last = given_groups(w) - 1, end = (last + 1) * w.group;
  for (long k = w.cols; k < end && k < w.kpad; ++k)
    bytes[k] = g.zeros[row * given_groups(w) + last] & 15;
}

// A row's words, a block apart. Nibbles of columns 0-3 are low, those of 4-7 high; int4 adds 8 to
// each, which is its top bit flipped.
void put_words(const WeightArg& w, const uint8_t* bytes, char* words) {
  const uint32_t flip = w.format == FMT_INT4 ? 0x88888888 : 0;
  for (long k = 0; k < w.kpad; k += w.step, words += kBlockBytes) {
    uint32_t low, high = 0;
    std::memcpy(&low, bytes + k, 4);
    if (w.step == 8) {
      std::memcpy(&high, bytes + k + 4, 4);
      low = ((low & 0x0F0F0F0F) | (high & 0x0F0F0F0F) << 4) ^ flip;
    }
    std::memcpy(words, &low, 4);
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
  std::vector<uint8_t> bytes(w.kpad);
  for (long tile = 0; tile < w.tiles; ++tile) {
    const long half = w.gate_up ? w.rows / 2 : w.rows;  // rows of one part
    const long part = w.gate_up ? tile % 2 : 0, first = (w.gate_up ? tile / 2 : tile) * kTileRows;
    for (long lane = 0; lane < kTileRows; ++lane) {
      const long row = first + lane < half ? part * half + first + lane : -1;
      fill_row(w, given, row, bytes.data());
      put_words(w, bytes.data(), matrix + tile * w.tile_bytes + 4 * lane);
      if (row >= 0) put_scales(w, given, matrix, tile, lane, row);
    }
  }
}

}  // namespace ktg
