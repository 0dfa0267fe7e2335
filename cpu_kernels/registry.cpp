#include "registry.h"

#include <algorithm>
#include <map>
#include <stdexcept>

namespace ktg {

namespace {

struct Row {
  const char *name, *signature, *attributes, *note;
};

// signature: operands in order, outputs behind "->"; T and O are the token and the output-row axis.
// attributes: name:type[=default]; types are float, int, bool or choices joined by "|".
constexpr Row kRows[] = {
    {"cpu.embedding", "ids:i32[T] table:f[VOC,D] -> out:f[T,D]", "", "Rows of a table."},
    {"cpu.rms_norm", "x:f[T,?H,D] w:f32[D] -> y:f[T,?H,D]", "eps:float late_cast:bool=false",
     "x * rsqrt(mean(x^2) + eps) * w over the last axis; late_cast: rounded once, after w."},
    {"cpu.add_rms_norm", "x:f[T,D] r:f[T,D] w:f32[D] -> sum:f[T,D] y:f[T,D]",
     "eps:float late_cast:bool=false",
     "sum = x + r; y = rms_norm(sum), from sum as rounded to its dtype."},
    {"cpu.linear", "x:f[T,K] w:weight[N,K] bias?:f32[N] -> y:f[T,N]", "", "y = W x + bias."},
    {"cpu.batched_linear", "x:f[T,H,K] w:weight[H,N,K] -> y:f[T,H,N]", "",
     "y[t, h] = W[h] x[t, h]."},
    {"cpu.rope",
     "q?:f[T,?Hq,P] k?:f[T,?Hk,P] inv_freq:f32[F] batch:batch -> q_out?:f[T,?Hq,P] "
     "k_out?:f[T,?Hk,P]",
     "style:half|interleaved|interleaved_to_half scale:float=1",
     "Rotary embedding of the first 2F entries (the rest is copied); an output may be its input."},
    {"cpu.kv_append_latent", "c:f[T,R] k_pe:f[T,P] state:state1 batch:batch ->", "layer:int",
     "Cache row = [c, k_pe]."},
    {"cpu.kv_append", "k:f[T,?G,A] v:f[T,?G,Av] state:state2 batch:batch ->", "layer:int",
     "Cache rows k and v."},
    {"cpu.rope_append_latent",
     "q_pe:f[T,?H,P] k_pe:f[T,P] c:f[T,R] inv_freq:f32[F] state:state1 batch:batch -> "
     "q_out:f[T,?H,P]",
     "style:half|interleaved|interleaved_to_half scale:float=1 layer:int",
     "rope of q_pe and k_pe, then kv_append_latent."},
    {"cpu.rope_append",
     "q:f[T,?H,A] k:f[T,?G,A] v:f[T,?G,Av] inv_freq:f32[F] state:state2 batch:batch -> "
     "q_out:f[T,?H,A]",
     "style:half|interleaved|interleaved_to_half scale:float=1 layer:int",
     "rope of q and k, then kv_append."},
    {"cpu.mla_attend", "q_lat:f[T,?H,R] q_pe:f[T,?H,P] state:state1 batch:batch -> o:f[T,?H,R]",
     "scale:float layer:int",
     "Absorbed MLA, causal: a cache row is the key and, in its first R entries, the value."},
    {"cpu.mla_attend_expanded",
     "q_nope:f[T,?H,N] q_pe:f[T,?H,P] state:state1 batch:batch w_kv_b:weight[HNV,R] -> o:f[T,?H,V]",
     "scale:float layer:int",
     "MLA with keys and values expanded from the latent rows; for long prefill."},
    {"cpu.sdpa", "q:f[T,?H,A] state:state2 batch:batch sinks?:f32[H] -> o:f[T,?H,Av]",
     "scale:float layer:int kv_heads:int window:int=0 softcap:float=0",
     "Causal attention with grouped kv heads."},
    {"cpu.moe_route", "x:f[T,D] gate:weight|f[E,D] bias?:f32[E] -> ids:i32[T,K] wts:f32[T,K]",
     "score:softmax|sigmoid|softmax_after_topk renorm:bool=false scale:float=1 groups:int=1 "
     "topk_groups:int=1 "
     "group_score:max|top2sum=max mask:zero|neg_inf=neg_inf bias_in_logits:bool=false",
     "Top-k experts by score + bias (bias selects only, unless bias_in_logits); the lower id wins "
     "ties."},
    {"cpu.grouped_mlp",
     "x:f[T,D] ids:i32[T,K] wts:f32[T,K] w13:weight[E,F2,D] w2:weight[E,D,F] b13?:f32[E,F2] "
     "b2?:f32[E,D] -> y:f[T,D]",
     "act:silu|gelu|gelu_tanh|relu|swiglu_clamped alpha:float=1.702 limit:float=7",
     "sum over k of wts * down(act(gate x) * up x); id -1 skips."},
    {"cpu.swiglu", "x:f[T,D] w13:weight[F2,D] w2:weight[Do,F] -> y:f[T,Do]",
     "act:silu|gelu|gelu_tanh|relu|swiglu_clamped=silu alpha:float=1.702 limit:float=7",
     "down(act(gate x) * up x)."},
    {"cpu.add", "a:f[T,?H,D] b:f[T,?H,D] -> y:f[T,?H,D]", "", "a + b."},
    {"cpu.add3", "a:f[T,?H,D] b:f[T,?H,D] c:f[T,?H,D] -> y:f[T,?H,D]", "", "(a + b) + c."},
    {"cpu.mul", "a:f[T,?H,D] b:f[T,?H,D1] -> y:f[T,?H,D]", "", "a * b; b's last axis may be 1."},
    {"cpu.sigmoid", "x:f[T,?H,D] -> y:f[T,?H,D]", "", "1 / (1 + exp(-x))."},
    {"cpu.copy", "x:f[T,?H,D] -> y:f[T,?H,D]", "", "Copies, and casts between f32 and bf16."},
    {"cpu.gather_rows", "x:f[T,D] batch:batch -> y:f[O,D]", "", "Rows batch.out_rows of x."},
};

const std::map<std::string, Attr> kAttrIds = {
    {"eps", A_EPS},
    {"scale", A_SCALE},
    {"style", A_STYLE},
    {"layer", A_LAYER},
    {"window", A_WINDOW},
    {"softcap", A_SOFTCAP},
    {"kv_heads", A_KV_HEADS},
    {"score", A_SCORE},
    {"renorm", A_RENORM},
    {"groups", A_GROUPS},
    {"topk_groups", A_TOPK_GROUPS},
    {"group_score", A_GROUP_SCORE},
    {"mask", A_MASK},
    {"act", A_ACT},
    {"alpha", A_ALPHA},
    {"limit", A_LIMIT},
    {"bias_in_logits", A_BIAS_IN_LOGITS},
    {"late_cast", A_LATE_CAST},
};

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> out;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(at, begin), text.size());
    out.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return out;
}

OperandSpec parse_operand(const std::string& word, bool output) {
  OperandSpec o;
  const size_t colon = word.find(':'), bracket = word.find('[');
  o.name = word.substr(0, colon);
  o.output = output;
  o.optional = o.name.back() == '?';
  if (o.optional) o.name.pop_back();
  o.kind = word.substr(colon + 1, bracket == std::string::npos ? bracket : bracket - colon - 1);
  if (bracket != std::string::npos)
    o.dims = split(word.substr(bracket + 1, word.size() - bracket - 2), ',');
  return o;
}

AttrSpec parse_attr(const std::string& word) {
  AttrSpec a;
  const size_t colon = word.find(':'), equals = word.find('=');
  a.name = word.substr(0, colon);
  a.id = kAttrIds.at(a.name);
  const std::string type =
      word.substr(colon + 1, equals == std::string::npos ? equals : equals - colon - 1);
  a.integer = type == "int", a.boolean = type == "bool";
  if (!a.integer && !a.boolean && type != "float") a.choices = split(type, '|');
  if (equals == std::string::npos) return a;
  a.required = false;
  a.default_text = word.substr(equals + 1);
  if (a.choices.empty()) {
    a.value = a.boolean ? a.default_text == "true" : std::stod(a.default_text);
    return a;
  }
  for (size_t i = 0; i < a.choices.size(); ++i)
    if (a.choices[i] == a.default_text) a.value = double(i);
  return a;
}

KernelSpec parse(const Row& row) {
  KernelSpec k{row.name, row.signature, row.attributes, row.note, {}, {}};
  bool output = false;
  for (const std::string& word : split(k.signature, ' ')) {
    if (word == "->")
      output = true;
    else if (!word.empty())
      k.operands.push_back(parse_operand(word, output));
  }
  for (const std::string& word : split(k.attributes, ' '))
    if (!word.empty()) k.attrs.push_back(parse_attr(word));
  return k;
}

}  // namespace

const std::vector<KernelSpec>& kernel_specs() {
  static const std::vector<KernelSpec> specs = [] {
    std::vector<KernelSpec> out;
    for (const Row& row : kRows) out.push_back(parse(row));
    return out;
  }();
  return specs;
}

const KernelSpec* find_spec(const std::string& name) {
  for (const KernelSpec& k : kernel_specs())
    if (k.name == name) return &k;
  return nullptr;
}

}  // namespace ktg
