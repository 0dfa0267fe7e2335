// Which token belongs to which sequence, and where its cache rows are. Plain data only (see
// formats.h).
#pragma once

namespace ktg {

struct BatchArg {
  long tokens, sequences, max_blocks, out_count;
  const int* tok_seq;      // [tokens]
  const int* tok_pos;      // [tokens]
  const int* seq_start;    // [sequences + 1]
  const int* kv_len;       // [sequences], rows including the new tokens
  const int* block_table;  // [sequences][max_blocks]
  const int* out_rows;     // [out_count]
};

}  // namespace ktg
