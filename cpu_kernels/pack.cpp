#include "pack.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "repack.h"

namespace ktg {

namespace {

float float_of(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
float widen(uint16_t v) { return float_of(uint32_t(v) << 16); }
float e4m3_value(uint8_t code) {
  const float magnitude = float_of(uint32_t(code & 0x7F) << 20) * 0x1p120f;
  return code & 0x80 ? -magnitude : magnitude;
}

// Where a logical row lies: its tile, and its place in it.
struct Place {
  long tile, lane;
};
Place place_of(const WeightArg& w, long row) {
  if (!w.gate_up) return {row / kTileRows, row % kTileRows};
  const long half = w.rows / 2, part = row / half, in_part = row % half;
  return {in_part / kTileRows * 2 + part, in_part % kTileRows};
}

const char* block_of(const WeightArg& w, const char* matrix, Place p, long k) {
  return matrix + p.tile * w.tile_bytes + k / w.step * kBlockBytes + 4 * p.lane;
}

long group_place(const WeightArg& w, Place p, long k) {
  return (p.tile * w.groups + k / w.group) * kTileRows + p.lane;
}
uint8_t code_at(const WeightArg& w, const char* matrix, Place p, long k) {
  return uint8_t(matrix[w.scale_offset + group_place(w, p, k)]);
}

int quant_at(const WeightArg& w, const char* matrix, Place p, long k) {
  const char* at = block_of(w, matrix, p, k);
  if (w.format == FMT_INT8 || w.format == FMT_INT8G) return int8_t(at[k % 4]);
  const uint8_t byte = uint8_t(at[k % 4]);
  const int nibble = k % 8 < 4 ? byte & 15 : byte >> 4;
  if (w.format == FMT_INT4Z) return nibble - matrix[w.outer_offset + group_place(w, p, k)];
  if (w.format == FMT_MXFP4) {
    constexpr int twice[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    return nibble & 8 ? -twice[nibble & 7] : twice[nibble & 7];
  }
  return nibble - (w.format == FMT_INT4P ? 8 - (code_at(w, matrix, p, k) >> 7) : 8);
}

float scale_at(const WeightArg& w, const char* matrix, Place p, long k) {
  const char* scales = matrix + w.scale_offset;
  const long row = p.tile * kTileRows + p.lane;
  if (w.format == FMT_INT8) return reinterpret_cast<const float*>(scales)[row];
  if (w.format == FMT_INT8G || w.format == FMT_FP8)
    return reinterpret_cast<const float*>(scales)[group_place(w, p, k)];
  if (w.format == FMT_INT4Z)
    return f16_value(reinterpret_cast<const uint16_t*>(scales)[group_place(w, p, k)]);
  if (w.format == FMT_MXFP4) {
    const uint32_t code = code_at(w, matrix, p, k);
    return 0.5f * float_of(code ? code << 23 : 0x400000);
  }
  if (w.format == FMT_INT4P)
    return float(code_at(w, matrix, p, k) & 15) *
           reinterpret_cast<const float*>(matrix + w.outer_offset)[row];
  return widen(reinterpret_cast<const uint16_t*>(scales)[group_place(w, p, k)]);
}

}  // namespace

float f16_value(uint16_t bits) {
  const float magnitude = float_of(uint32_t(bits & 0x7FFF) << 13) * 0x1p112f;
  return bits & 0x8000 ? -magnitude : magnitude;
}
uint16_t f16_bits(float v) {
  const float small = v * 0x1p-112f;
  uint32_t bits;
  std::memcpy(&bits, &small, 4);
  return uint16_t(bits >> 16 & 0x8000) | uint16_t(bits >> 13 & 0x7FFF);
}

void pack_matrix(const IsaTable& isa, const WeightArg& w, char* stack, long index,
                 const Source& src) {
  if (from_gguf(w.format))
    throw std::invalid_argument("pack: " + std::string(format_name(w.format)) +
                                " comes from a GGUF file; use repack_into");
  const auto pair = [](long a, long b) {
    return "[" + std::to_string(a) + ", " + std::to_string(b) + "]";
  };
  if (index < 0 || index >= w.count)
    throw std::invalid_argument("pack: index " + std::to_string(index) + " of a stack of " +
                                std::to_string(w.count));
  if (src.rows != w.rows || src.cols != w.cols)
    throw std::invalid_argument("pack: the source is " + pair(src.rows, src.cols) +
                                ", the weight " + pair(w.rows, w.cols));
  std::vector<float> rows(16 * w.kpad + 64);
  char* dst = stack + index * w.stride;
  std::memset(dst + w.scale_offset, 0, w.stride - w.scale_offset);  // also between the tables
  const long bad = isa.pack({w, dst, src.data, src.dtype, src.stride, rows.data()});
  if (bad >= 0)
    throw std::invalid_argument("pack: row " + std::to_string(bad) + " holds inf or NaN" +
                                (w.format == FMT_F16 ? ", or more than f16's 65504" : ""));
}

void read_quantized(const WeightArg& w, const char* stack, long index, int8_t* q, float* scales) {
  const char* matrix = stack + index * w.stride;
  const long per_row = w.group ? (w.cols + w.group - 1) / w.group : 1;
  const long span = w.group ? w.group : w.cols;
  for (long r = 0; r < w.rows; ++r) {
    const Place p = place_of(w, r);
    for (long k = 0; k < w.cols; ++k) q[r * w.cols + k] = int8_t(quant_at(w, matrix, p, k));
    for (long g = 0; g < per_row; ++g) scales[r * per_row + g] = scale_at(w, matrix, p, g * span);
  }
}

void unpack_matrix(const WeightArg& w, const char* stack, long index, float* dst) {
  if (from_gguf(w.format)) return unpack_blocks(w, stack, index, dst);
  const char* matrix = stack + index * w.stride;
  for (long r = 0; r < w.rows; ++r) {
    const Place p = place_of(w, r);
    for (long k = 0; k < w.cols; ++k) {
      const char* at = block_of(w, matrix, p, k);
      float& out = dst[r * w.cols + k];
      if (w.format == FMT_F32)
        std::memcpy(&out, at, 4);
      else if (w.format == FMT_BF16)
        out = widen(reinterpret_cast<const uint16_t*>(at)[k % 2]);
      else if (w.format == FMT_F16)
        out = f16_value(reinterpret_cast<const uint16_t*>(at)[k % 2]);
      else if (w.format == FMT_FP8)
        out = e4m3_value(uint8_t(at[k % 4])) * scale_at(w, matrix, p, k);
      else
        out = float(quant_at(w, matrix, p, k)) * scale_at(w, matrix, p, k);
    }
  }
}

}  // namespace ktg
