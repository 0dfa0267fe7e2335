// Views of memory owned by Python. Plain data only (see formats.h).
#pragma once

namespace ktg {

enum DType : int { DT_F32 = 0, DT_BF16, DT_I32 };

constexpr long kAxisTokens = -1;  // first axis = tokens of the run
constexpr long kAxisRows = -2;    // first axis = output rows of the run

// Every tensor is seen as [first][heads][last]; absent axes have size 1. The last stride is 1.
struct TensorArg {
  char* data;
  int dtype;
  int rank;        // as the caller gave it
  long dim[3];     // dim[0] may be kAxisTokens / kAxisRows until a run resolves it
  long axis;       // what dim[0] was before that
  long stride[2];  // elements, of the first and the head axis
};

// A paged cache: each part is [layer][page][page_size][row].
struct StateArg {
  int dtype;
  int parts;
  long layers, pages, page_size;
  long row[2];
  char* data[2];
};

}  // namespace ktg
