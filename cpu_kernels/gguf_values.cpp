// The values of GGUF blocks, computed in f32 in the order of the gguf package (gguf/quants.py).
#include <cstring>

#include "repack.h"

namespace ktg {

float half_value(const uint8_t* at) {
  const uint32_t bits = at[0] | uint32_t(at[1]) << 8;
  const uint32_t wide = (bits & 0x7FFF) << 13;
  float f;
  std::memcpy(&f, &wide, 4);
  f *= 0x1p112f;  // the exponent's bias: 127 - 15; exact, subnormal halves too
  return bits & 0x8000 ? -f : f;
}

namespace {

constexpr float kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                  1,    13,   25,  38,  53,  69,  89,  113};

int nibble(uint8_t byte, bool high) { return high ? byte >> 4 : byte & 15; }

void q4_0(const uint8_t* b, float* out) {
  const float d = half_value(b);
  for (int i = 0; i < 32; ++i) out[i] = d * float(nibble(b[2 + i % 16], i >= 16) - 8);
}

void q8_0(const uint8_t* b, float* out) {
  const float d = half_value(b);
  for (int i = 0; i < 32; ++i) out[i] = float(int8_t(b[2 + i])) * d;
}

// Six bits each, of 32 columns: scale and minimum of sub-block j.
int k_scale(const uint8_t* s, int j) {
  return j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 2 & 0x30);
}
int k_minimum(const uint8_t* s, int j) {
  return j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 2 & 0x30);
}

void q4_or_q5(const uint8_t* b, const uint8_t* high, const uint8_t* low, float* out) {
  const float d = half_value(b), minimum = half_value(b + 2);
  for (int j = 0; j < 8; ++j) {
    const float scale = d * float(k_scale(b + 4, j)), less = minimum * float(k_minimum(b + 4, j));
    for (int i = 0; i < 32; ++i) {
      const int fifth = high ? high[i] >> j & 1 : 0;
      const int q = nibble(low[j / 2 * 32 + i], j % 2) | fifth << 4;
      const float product = scale * float(q);
      out[32 * j + i] = product - less;
    }
  }
}

void q4_k(const uint8_t* b, float* out) { q4_or_q5(b, nullptr, b + 16, out); }
void q5_k(const uint8_t* b, float* out) { q4_or_q5(b, b + 16, b + 48, out); }

void q6_k(const uint8_t* b, float* out) {
  const uint8_t *high = b + 128, *scales = b + 192;
  const float d = half_value(b + 208);
  for (int k = 0; k < 256; ++k) {
    const int half = k / 128, part = k / 32 % 4, i = k % 32;
    const int four = nibble(b[64 * half + part % 2 * 32 + i], part >= 2);
    const int two = high[32 * half + i] >> 2 * part & 3;
    out[k] = d * float(int8_t(scales[k / 16])) * float((four | two << 4) - 32);
  }
}

void iq4_xs(const uint8_t* b, float* out) {
  const float d = half_value(b);
  const int high = b[2] | b[3] << 8;
  for (int j = 0; j < 8; ++j) {
    const int scale = nibble(b[4 + j / 2], j % 2) | (high >> 2 * j & 3) << 4;
    for (int i = 0; i < 32; ++i)
      out[32 * j + i] = d * float(scale - 32) * kIq4Values[nibble(b[8 + 16 * j + i % 16], i >= 16)];
  }
}

constexpr FileBlock kBlocks[] = {
    {32, 18, {0, -1}, q4_0},  {32, 34, {0, -1}, q8_0},     {256, 144, {0, 2}, q4_k},
    {256, 176, {0, 2}, q5_k}, {256, 210, {208, -1}, q6_k}, {256, 136, {0, -1}, iq4_xs},
};

}  // namespace

const FileBlock& file_block(int format) { return kBlocks[format - FMT_Q4_0]; }

}  // namespace ktg
