// The public functions behind one face: a case of the table becomes a call.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sirtaki/torch.h"
#include "tests/conformance/case_table.h"

namespace sirtaki::tests::conformance {

// What goes into a call beside the problem and the form.
struct Arguments {
  std::string name;  // empty: matched by call order
  ProcessSet process_set;
  int root = -1;                     // world rank, of collectives that have one
  std::vector<std::int64_t> splits;  // of collectives that take them
  // The factors are those of reductions, the compression that of all-reduces.
  double prescale = 1.0;
  double postscale = 1.0;
  Compression compression = Compression::None;
};

// What came out: one tensor, or those of the group.
struct Outcome {
  std::vector<at::Tensor> tensors;
  // The splits received for each tensor; empty where the form does not tell.
  std::vector<std::vector<std::int64_t>> received_splits;
};

// What an asynchronous form has started.
struct Started {
  Handle one;
  GroupedHandle group;
};

// A form that is not grouped uses the first tensor alone. They throw what the function throws.
Outcome CallAndWait(const Problem& problem, Form form, const std::vector<at::Tensor>& tensors,
                    const Arguments& arguments);
Started CallAsync(const Problem& problem, Form form, const std::vector<at::Tensor>& tensors,
                  const Arguments& arguments);
Outcome WaitFor(const Started& started);

ReduceOp PublicOp(core::ReduceOp op);

}  // namespace sirtaki::tests::conformance
