// Rows of the paged cache.
#pragma once

namespace ktg {
namespace KTG_ISA {
namespace {

// Row `pos` of a sequence in one part of a layer. The plan has checked pages and lengths before the
// run.
KTG_IN char* cache_row(const StateArg& s, int part, long layer, const BatchArg& b, long seq,
                       long pos) {
  const long page = b.block_table[seq * b.max_blocks + pos / s.page_size];
  const long row = (layer * s.pages + page) * s.page_size + pos % s.page_size;
  return s.data[part] + row * s.row[part] * item_bytes(s.dtype);
}

// Copies a row of any dtype to a place of any dtype.
KTG_IN void put_row(const TensorArg& src, long i, long h, char* dst, int dst_dtype, float* buffer) {
  narrow(row_in(src, i, h, buffer), src.dim[2], dst, dst_dtype);
}

KTG_IN float* row_buffer(const Ctx& ctx) { return reinterpret_cast<float*>(ctx.local); }

static void append_latent_token(const Ctx& ctx, const TensorArg& c, const StateArg& s, long layer,
                                long t) {
  char* row = cache_row(s, 0, layer, *ctx.batch, ctx.batch->tok_seq[t], ctx.batch->tok_pos[t]);
  put_row(c, t, 0, row, s.dtype, row_buffer(ctx));
}

// One token's rows of all kv heads: [heads][width] in the cache.
static void append_heads(const Ctx& ctx, const TensorArg& x, const StateArg& s, int part,
                         long layer, long t) {
  char* row = cache_row(s, part, layer, *ctx.batch, ctx.batch->tok_seq[t], ctx.batch->tok_pos[t]);
  for (long h = 0; h < x.dim[1]; ++h)
    put_row(x, t, h, row + h * x.dim[2] * item_bytes(s.dtype), s.dtype, row_buffer(ctx));
}

static void kv_append_latent(const Ctx& ctx, const Instr& in) {
  const TensorArg &c = tensor(in, 0), &pe = tensor(in, 1);
  const StateArg& s = in.op[2].s;
  const long layer = long(in.attr[A_LAYER]);
  const Range r = my_range(ctx, c.dim[0]);
  for (long t = r.begin; t < r.end; ++t) {
    append_latent_token(ctx, c, s, layer, t);
    char* row = cache_row(s, 0, layer, *ctx.batch, ctx.batch->tok_seq[t], ctx.batch->tok_pos[t]);
    put_row(pe, t, 0, row + c.dim[2] * item_bytes(s.dtype), s.dtype, row_buffer(ctx));
  }
}

static void kv_append(const Ctx& ctx, const Instr& in) {
  const Range r = my_range(ctx, tensor(in, 0).dim[0]);
  for (long t = r.begin; t < r.end; ++t)
    for (int part = 0; part < 2; ++part)
      append_heads(ctx, tensor(in, part), in.op[2].s, part, long(in.attr[A_LAYER]), t);
}

static size_t append_local(const Instr& in, const Sizes&) {
  long widest = 0;
  for (int i = 0; i < in.count; ++i)
    if (in.op[i].kind == KIND_TENSOR) widest = lmax(widest, in.op[i].t.dim[2]);
  return 4 * align64(size_t(widest + 16) * 4);
}

}  // namespace
}  // namespace KTG_ISA
}  // namespace ktg
