#include "formats.h"

#include <cstring>

namespace ktg {

namespace {
constexpr const char* kNames[] = {"f32", "bf16", "int8", "int4", "int4p"};
constexpr long kSteps[] = {1, 2, 4, 8, 8};
// Columns are padded to what one tile operation takes: 32 bf16 or 64 integers.
constexpr long kPads[] = {1, 32, 64, 64, 64};
constexpr const char* kActivations[] = {"f32", "bf16", "int8"};
bool has_groups(int format) { return format == FMT_INT4 || format == FMT_INT4P; }
long round_up(long n, long to) { return (n + to - 1) / to * to; }
}  // namespace

const char* format_name(int format) { return kNames[format]; }

const char* describe_weight(const char* format, long rows, long cols, long count, long group,
                            bool gate_up, WeightArg* out) {
  WeightArg w{};
  w.format = -1;
  for (int i = 0; i < 5; ++i)
    if (std::strcmp(format, kNames[i]) == 0) w.format = i;
  if (w.format < 0) return "unknown format (f32, bf16, int8, int4 or int4p)";
  if (rows < 1 || cols < 1 || count < 1) return "rows, cols and count must be positive";
  if (has_groups(w.format) && group != 32 && group != 64 && group != 128)
    return "int4 and int4p need group 32, 64 or 128";
  if (!has_groups(w.format) && group != 0) return "only int4 and int4p have a group; pass 0";
  if (gate_up && rows % 2) return "gate_up needs an even number of rows";
  w.gate_up = gate_up;
  w.rows = rows, w.cols = cols, w.count = count, w.group = group;
  w.tiles = gate_up ? 2 * (round_up(rows / 2, kTileRows) / kTileRows)
                    : round_up(rows, kTileRows) / kTileRows;
  w.step = kSteps[w.format];
  w.kpad = round_up(cols, kPads[w.format]);
  w.groups = group ? (w.kpad + group - 1) / group : 0;
  w.tile_bytes = w.kpad / w.step * kBlockBytes;
  w.scale_offset = w.tiles * w.tile_bytes;
  long bytes = w.scale_offset;
  if (w.format == FMT_INT8) bytes += w.tiles * kTileRows * 4;
  if (w.format == FMT_INT4) bytes += w.tiles * w.groups * kTileRows * 2;
  if (w.format == FMT_INT4P) {
    w.outer_offset = round_up(bytes + w.tiles * w.groups * kTileRows, 64);
    bytes = w.outer_offset + w.tiles * kTileRows * 4;
  }
  w.stride = round_up(bytes, 64);
  if (w.stride % 4096 == 0) w.stride += 64;
  w.activations = w.format == FMT_INT4P ? ACTS_INT8 : ACTS_F32;
  *out = w;
  return nullptr;
}

const char* set_activations(const char* name, WeightArg* w) {
  int found = -1;
  for (int i = 0; i < 3; ++i)
    if (std::strcmp(name, kActivations[i]) == 0) found = i;
  if (found < 0) return "unknown activations (f32, bf16 or int8)";
  const bool integers = w->format >= FMT_INT8;
  if (found == ACTS_BF16 && w->format != FMT_BF16) return "activations bf16 go with bf16 weights";
  if (found == ACTS_INT8 && !integers) return "activations int8 go with integer weights";
  if (found != ACTS_INT8 && w->format == FMT_INT4P) return "int4p takes activations int8 only";
  w->activations = found;
  return nullptr;
}

}  // namespace ktg
