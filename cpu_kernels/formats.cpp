#include "formats.h"

#include <cstring>

namespace ktg {

namespace {
constexpr const char* kNames[] = {"f32", "bf16", "int8", "int4"};
constexpr long kSteps[] = {1, 2, 4, 8};
long round_up(long n, long to) { return (n + to - 1) / to * to; }
}  // namespace

const char* format_name(int format) { return kNames[format]; }

const char* describe_weight(const char* format, long rows, long cols, long count, long group,
                            bool gate_up, WeightArg* out) {
  WeightArg w{};
  w.format = -1;
  for (int i = 0; i < 4; ++i)
    if (std::strcmp(format, kNames[i]) == 0) w.format = i;
  if (w.format < 0) return "unknown format (f32, bf16, int8 or int4)";
  if (rows < 1 || cols < 1 || count < 1) return "rows, cols and count must be positive";
  if (w.format == FMT_INT4 && group != 32 && group != 64 && group != 128)
    return "int4 needs group 32, 64 or 128";
  if (w.format != FMT_INT4 && group != 0) return "only int4 has a group; pass 0";
  if (gate_up && rows % 2) return "gate_up needs an even number of rows";
  w.gate_up = gate_up;
  w.rows = rows, w.cols = cols, w.count = count, w.group = group;
  w.tiles = gate_up ? 2 * (round_up(rows / 2, kTileRows) / kTileRows)
                    : round_up(rows, kTileRows) / kTileRows;
  w.step = kSteps[w.format];
  w.kpad = round_up(cols, w.step);
  w.groups = group ? (cols + group - 1) / group : 0;
  w.tile_bytes = w.kpad / w.step * kBlockBytes;
  w.scale_offset = w.tiles * w.tile_bytes;
  long bytes = w.scale_offset;
  if (w.format == FMT_INT8) bytes += w.tiles * kTileRows * 4;
  if (w.format == FMT_INT4) bytes += w.tiles * w.groups * kTileRows * 2;
  w.stride = round_up(bytes, 64);
  if (w.stride % 4096 == 0) w.stride += 64;
  *out = w;
  return nullptr;
}

}  // namespace ktg
