// Tile registers: 8 of up to 16 rows x 64 bytes. KTG_TILES 1: AMX (Intel SDM, AMX chapters);
// 2: the same operations in plain C++, so that tile code is tested on machines without AMX;
// undefined: none.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

#ifdef KTG_TILES
constexpr bool kHasTiles = true;

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_per_row[16];
  uint8_t rows[16];
};

// Tiles 0-3 accumulate, 4-5 hold rows (A), 6-7 weights (B): `bytes` of A's rows meet bytes / 4 rows
// of B.
KTG_IN TileConfig tile_config(long bytes) {
  TileConfig c{};
  c.palette = 1;
  for (int i = 0; i < 8; ++i) c.bytes_per_row[i] = 64, c.rows[i] = 16;
  for (int i = 4; i < 6; ++i) c.bytes_per_row[i] = uint16_t(bytes);
  for (int i = 6; i < 8; ++i) c.rows[i] = uint8_t(bytes / 4);
  return c;
}
#else
constexpr bool kHasTiles = false;
struct TileUse {
  explicit TileUse(long) {}
};
#endif

#if KTG_TILES + 0 == 1
// Inline assembly: gcc's intrinsics want literal tile numbers, which template arguments are not.
template <int T>
KTG_IN void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
KTG_IN void tile_load(const void* p, long stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
template <int T>
KTG_IN void tile_store(void* p, long stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
template <int C, int A, int B>
KTG_IN void tile_dot_int8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
KTG_IN void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
struct TileUse {
  explicit TileUse(long columns) {
    const TileConfig c = tile_config(columns < 64 ? columns : 64);
    asm volatile("ldtilecfg %0" ::"m"(c));
  }
  ~TileUse() { asm volatile("tilerelease"); }
};
#elif KTG_TILES + 0 == 2
struct Tile {
  uint8_t at[16][64];
};
static thread_local Tile tile_of_thread[8];
static thread_local TileConfig tile_shape{};

template <int T>
KTG_IN void tile_zero() {
  __builtin_memset(&tile_of_thread[T], 0, sizeof(Tile));
}
template <int T>
static void tile_load(const void* p, long stride) {
  tile_zero<T>();  // hardware clears what lies beyond the configured shape
  for (int r = 0; r < tile_shape.rows[T]; ++r)
    __builtin_memcpy(tile_of_thread[T].at[r], static_cast<const char*>(p) + r * stride,
                     tile_shape.bytes_per_row[T]);
}
template <int T>
static void tile_store(void* p, long stride) {
  for (int r = 0; r < tile_shape.rows[T]; ++r)
    __builtin_memcpy(static_cast<char*>(p) + r * stride, tile_of_thread[T].at[r],
                     tile_shape.bytes_per_row[T]);
}
template <int C, int A, int B>
static void tile_dot_int8() {
  for (int m = 0; m < tile_shape.rows[C]; ++m) {
    int32_t row[16];
    __builtin_memcpy(row, tile_of_thread[C].at[m], 64);
    for (int k = 0; k < tile_shape.bytes_per_row[A]; ++k)
      for (int n = 0; n < 16; ++n)
        row[n] +=
            int8_t(tile_of_thread[A].at[m][k]) * int8_t(tile_of_thread[B].at[k / 4][4 * n + k % 4]);
    __builtin_memcpy(tile_of_thread[C].at[m], row, 64);
  }
}
// Even and odd products are summed apart and meet at the end, denormals are zero (Intel SDM).
template <int C, int A, int B>
static void tile_dot_bf16() {
  const auto value = [](const uint8_t* p) {
    u16 bits;
    __builtin_memcpy(&bits, p, 2);
    const float f = bf16_to_f32(bits);
    return __builtin_fabsf(f) < 1.17549435e-38f ? 0.0f : f;
  };
  for (int m = 0; m < tile_shape.rows[C]; ++m) {
    float row[16];
    __builtin_memcpy(row, tile_of_thread[C].at[m], 64);
    for (int n = 0; n < 16; ++n) {
      float parts[2] = {0, 0};
      for (int k = 0; k < tile_shape.bytes_per_row[A] / 2; ++k)
        parts[k % 2] =
            __builtin_fmaf(value(tile_of_thread[A].at[m] + 2 * k),
                           value(tile_of_thread[B].at[k / 2] + 4 * n + 2 * (k % 2)), parts[k % 2]);
      row[n] += parts[0] + parts[1];
    }
    __builtin_memcpy(tile_of_thread[C].at[m], row, 64);
  }
}
struct TileUse {
  explicit TileUse(long columns) { tile_shape = tile_config(columns < 64 ? columns : 64); }
  ~TileUse() { tile_shape = TileConfig{}; }
};
#endif

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
