#include "formats.h"

#include <cstring>

namespace ktg {

namespace {
constexpr const char* kNames[] = {"f32",   "bf16",  "int8", "int4",  "int4p", "int8",
                                  "int4z", "mxfp4", "f16",  "fp8",   "q4_0",  "q8_0",
                                  "q4_k",  "q5_k",  "q6_k", "iq4_xs"};
constexpr int kCount = sizeof kNames / sizeof *kNames;
constexpr long kSteps[] = {1, 2, 4, 8, 8, 4, 8, 8, 2, 4, 64, 64, 256, 256, 256, 256};
// 64-byte blocks for these columns: a 32-bit word per row, or the words of GGUF blocks (repack.h).
constexpr long kLines[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 9, 17, 36, 44, 53, 34};
// Columns are padded to what one tile operation takes: 32 bf16 or 64 integers.
constexpr long kPads[] = {1, 32, 64, 64, 64, 64, 64, 64, 32, 64, 64, 64, 256, 256, 256, 256};
constexpr long kFileBlocks[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 32, 32, 256, 256, 256, 256};
// Bytes that each group of a row keeps; 0: no groups.
constexpr long kScaleBytes[] = {0, 0, 0, 2, 1, 4, 2, 1, 0, 4, 0, 0, 0, 0, 0, 0};
constexpr const char* kActivations[] = {"f32", "bf16", "int8"};
const char* wrong_group(int format, long group) {
  const bool fits = group == 32 || group == 64 || group == 128;
  if (format == FMT_MXFP4) return group == 32 ? nullptr : "mxfp4 needs group 32";
  if (format == FMT_FP8) return group == 128 ? nullptr : "fp8 needs group 128";
  if (kScaleBytes[format])
    return fits ? nullptr : "a format with groups (int4, int8, ...) needs group 32, 64 or 128";
  return group == 0 ? nullptr : "f32, bf16 and f16 have no groups; pass 0";
}
long round_up(long n, long to) { return (n + to - 1) / to * to; }
}  // namespace

const char* format_name(int format) { return kNames[format]; }
bool has_integers(int format) {
  return format >= FMT_INT8 && format != FMT_F16 && format != FMT_FP8;
}
bool from_gguf(int format) { return format >= FMT_Q4_0; }

const char* describe_weight(const char* format, long rows, long cols, long count, long group,
                            bool gate_up, WeightArg* out) {
  WeightArg w{};
  w.format = -1;
  for (int i = kCount - 1; i >= 0; --i)
    if (std::strcmp(format, kNames[i]) == 0) w.format = i;
  if (w.format < 0)
    return "unknown format (f32, bf16, f16, fp8, int8, int4, int4p, int4z, mxfp4, q4_0, q8_0, "
           "q4_k, "
           "q5_k, q6_k or iq4_xs)";
  if (w.format == FMT_INT8 && group) w.format = FMT_INT8G;
  if (rows < 1 || cols < 1 || count < 1) return "rows, cols and count must be positive";
  if (const char* error = wrong_group(w.format, group)) return error;
  if (cols % kFileBlocks[w.format])
    return kFileBlocks[w.format] == 32 ? "q4_0 and q8_0 need columns in whole blocks of 32"
                                       : "K-quants and iq4_xs need columns in whole blocks of 256";
  if (gate_up && rows % 2) return "gate_up needs an even number of rows";
  w.gate_up = gate_up;
  w.rows = rows, w.cols = cols, w.count = count, w.group = group;
  w.tiles = gate_up ? 2 * (round_up(rows / 2, kTileRows) / kTileRows)
                    : round_up(rows, kTileRows) / kTileRows;
  w.step = kSteps[w.format], w.lines = kLines[w.format];
  w.kpad = round_up(cols, kPads[w.format]);
  w.groups = group ? (w.kpad + group - 1) / group : 0;
  w.tile_bytes = w.kpad / w.step * w.lines * kBlockBytes;
  w.scale_offset = w.tiles * w.tile_bytes;
  const long places = w.tiles * w.groups * kTileRows;
  long bytes = w.scale_offset + places * kScaleBytes[w.format];
  if (w.format == FMT_INT8) bytes += w.tiles * kTileRows * 4;
  if (w.format == FMT_INT4P || w.format == FMT_INT4Z) {
    w.outer_offset = round_up(bytes, 64);
    bytes = w.outer_offset + (w.format == FMT_INT4P ? w.tiles * kTileRows * 4 : places);
  }
  w.stride = round_up(bytes, 64);
  if (w.stride % 4096 == 0) w.stride += 64;
  w.activations = w.format == FMT_INT4P || from_gguf(w.format) ? ACTS_INT8 : ACTS_F32;
  *out = w;
  return nullptr;
}

const char* set_activations(const char* name, WeightArg* w) {
  int found = -1;
  for (int i = 0; i < 3; ++i)
    if (std::strcmp(name, kActivations[i]) == 0) found = i;
  if (found < 0) return "unknown activations (f32, bf16 or int8)";
  if (found == ACTS_BF16 && w->format != FMT_BF16 && w->format != FMT_FP8)
    return "activations bf16 go with bf16 weights or fp8";
  if (found == ACTS_INT8 && !has_integers(w->format))
    return "activations int8 go with integer weights";
  if (found != ACTS_INT8 && w->format == FMT_INT4P) return "int4p takes activations int8 only";
  if (found != ACTS_INT8 && from_gguf(w->format)) return "GGUF formats take activations int8 only";
  w->activations = found;
  return nullptr;
}

}  // namespace ktg
