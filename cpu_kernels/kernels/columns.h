// Columns of packed weights as f32, for rows that stay f32. A format says
//   kStep            columns per block of 64 bytes
//   column<K>(w, z)  column K of a block in f32; z: the zero points of the group, where it has any
//   kGrouped, scale  a scale per group: every group is a chain of its own
//   kRowScale        a scale per row, at the end
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

struct Tiles {
  const WeightArg* w;
  const char* matrix;  // start of one matrix of the stack
  long first, count;   // tiles
};

KTG_IN Tiles tiles_of(const WeightArg& w, long index, long first, long count) {
  return {&w, w.data + index * w.stride, first, count};
}
KTG_IN const char* tile_data(const Tiles& t, long n) {
  return t.matrix + (t.first + n) * t.w->tile_bytes;
}

// Scales, factors and zeros of 16 rows: per row, or per row and group.
KTG_IN F int8_scale(const Tiles& t, long n) {
  return load(reinterpret_cast<const float*>(t.matrix + t.w->scale_offset) + (t.first + n) * 16);
}
KTG_IN long group_place(const Tiles& t, long n, long group) {
  return ((t.first + n) * t.w->groups + group) * 16;
}
KTG_IN F group_scale(const Tiles& t, long n, long group) {
  return load(reinterpret_cast<const float*>(t.matrix + t.w->scale_offset) +
              group_place(t, n, group));
}
KTG_IN F int4_scale(const Tiles& t, long n, long group) {
  return load_bf16(reinterpret_cast<const u16*>(t.matrix + t.w->scale_offset) +
                   group_place(t, n, group));
}
KTG_IN F int4z_scale(const Tiles& t, long n, long group) {
  return load_f16(reinterpret_cast<const u16*>(t.matrix + t.w->scale_offset) +
                  group_place(t, n, group));
}
KTG_IN I int4z_zeros(const Tiles& t, long n, long group) {
  return load_bytes(reinterpret_cast<const uint8_t*>(t.matrix + t.w->outer_offset) +
                    group_place(t, n, group));
}
// Half of 2^(code - 127), for twice the value of an e2m1 code; 2^-127 has no normal f32.
KTG_IN F mxfp4_scale(const Tiles& t, long n, long group) {
  const I code = load_bytes(reinterpret_cast<const uint8_t*>(t.matrix + t.w->scale_offset) +
                            group_place(t, n, group));
  return mul(set1(0.5f), float_of(imax(shift_left(code, 23), iset1(0x400000))));
}

struct NoZeros {};
struct PlainColumns {
  static constexpr bool kGrouped = false, kRowScale = false;
  KTG_IN F scale(const Tiles&, long, long) { return zero(); }
  KTG_IN NoZeros zeros(const Tiles&, long, long) { return {}; }
};
struct GroupColumns {
  static constexpr bool kGrouped = true, kRowScale = false;
  KTG_IN NoZeros zeros(const Tiles&, long, long) { return {}; }
};

struct Bf16Format : PlainColumns {
  static constexpr int kStep = 2;
  template <int K>
  KTG_IN F column(I w, NoZeros) {
    return bf16_column<K>(w);
  }
};
struct F16Format : PlainColumns {
  static constexpr int kStep = 2;
  template <int K>
  KTG_IN F column(I w, NoZeros) {
    return f16_column<K>(w);
  }
};
struct Int8Format : PlainColumns {
  static constexpr int kStep = 4;
  static constexpr bool kRowScale = true;
  template <int K>
  KTG_IN F column(I w, NoZeros) {
    return int8_column<K>(w);
  }
};
struct Int8GFormat : GroupColumns {
  static constexpr int kStep = 4;
  KTG_IN F scale(const Tiles& t, long n, long group) { return group_scale(t, n, group); }
  template <int K>
  KTG_IN F column(I w, NoZeros) {
    return int8_column<K>(w);
  }
};
struct Int4Format : GroupColumns {
  static constexpr int kStep = 8;
  KTG_IN F scale(const Tiles& t, long n, long group) { return int4_scale(t, n, group); }
  template <int K>
  KTG_IN F column(I w, NoZeros) {
    return int4_column<K>(w);
  }
};
struct Int4zFormat : GroupColumns {
  static constexpr int kStep = 8;
  KTG_IN F scale(const Tiles& t, long n, long group) { return int4z_scale(t, n, group); }
  // int4_column has taken 8 off already
  KTG_IN F zeros(const Tiles& t, long n, long group) {
    return to_float(isub(int4z_zeros(t, n, group), iset1(8)));
  }
  template <int K>
  KTG_IN F column(I w, F zeros) {
    return sub(int4_column<K>(w), zeros);
  }
};
struct Mxfp4Format : GroupColumns {
  static constexpr int kStep = 8;
  KTG_IN F scale(const Tiles& t, long n, long group) { return mxfp4_scale(t, n, group); }
  template <int K>
  KTG_IN F column(I w, NoZeros) {
    return mxfp4_column<K>(w);
  }
};
struct Fp8Format : GroupColumns {
  static constexpr int kStep = 4;
  KTG_IN F scale(const Tiles& t, long n, long group) { return group_scale(t, n, group); }
  template <int K>
  KTG_IN F column(I w, NoZeros) {
    return fp8_column<K>(w);
  }
};

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
