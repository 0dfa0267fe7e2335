// Limits of AMX: 2 x 2 blocks of tiles (two A, two B, four accumulators) that stay in registers;
// and the same with the four operands of every step loaded from the first-level cache, which is
// what a matrix product cannot do without: 8 tiles allow no fewer loads a product. Where another
// virtual machine keeps the core's other thread busy, the second is a third of the first.
#include "cpu_limits.h"

#include <immintrin.h>

#include <cstdint>

namespace ktg {
namespace avx512_amx_limits {

namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};  // the CPU has 8 tiles, the rest must be 0
};

void start() {
  // In memory, not on the stack: the intrinsic tells the compiler of its first 8 bytes only.
  static const TileConfig config;
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
}

constexpr double kTileMacs = 4.0 * 16 * 16;  // times the products in 64 bytes, per round

constexpr int kSteps = 4;                     // rounds go through them in turn
alignas(64) char operands[4 * kSteps][1024];  // zeros

const char* operand(long round, int which) { return operands[round % kSteps * 4 + which]; }

}  // namespace

double int8(long rounds) {
  start();
  for (long i = 0; i < rounds; ++i) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_release();
  return double(rounds) * kTileMacs * 64 * 2;
}

double int8_loaded(long rounds) {
  start();
  for (long i = 0; i < rounds; ++i) {
    _tile_loadd(6, operand(i, 0), 64);
    _tile_loadd(4, operand(i, 1), 64);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, operand(i, 2), 64);
    _tile_dpbssd(1, 4, 7);
    _tile_loadd(5, operand(i, 3), 64);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_release();
  return double(rounds) * kTileMacs * 64 * 2;
}

double bf16_loaded(long rounds) {
  start();
  for (long i = 0; i < rounds; ++i) {
    _tile_loadd(6, operand(i, 0), 64);
    _tile_loadd(4, operand(i, 1), 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, operand(i, 2), 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, operand(i, 3), 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return double(rounds) * kTileMacs * 32 * 2;
}

double bf16(long rounds) {
  start();
  for (long i = 0; i < rounds; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return double(rounds) * kTileMacs * 32 * 2;
}

}  // namespace avx512_amx_limits
}  // namespace ktg
