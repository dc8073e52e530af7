// What a LibTorch archive saves, from one rank to all, without a second copy of it in memory.
//
// A saved archive is a zip file, and nearly all of it is the bytes of tensors. The root lets the
// archive write itself twice. The first time all but those bytes is kept, the skeleton, with the
// holes in it where they belong; that goes to the others first, since the directory of a zip file
// is at its end. The second time the bytes are taken from the tensors' own memory as they are
// written, and go through two buffers of a chunk each into the memory that the others' archives
// give for the tensors they make.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "frameworks/torch/session/session_set.h"
#include "sirtaki/objects.h"

namespace torch::optim {
class Optimizer;
}

namespace sirtaki::detail {

// The bytes of one tensor in the saved archive.
struct Hole {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;

  std::uint64_t end() const { return offset + bytes; }
};

struct Skeleton {
  std::string bytes;        // all of the archive but the holes
  std::vector<Hole> holes;  // ascending
  std::uint64_t total = 0;  // bytes of the whole archive
};

// Throws what `save` throws.
Skeleton Survey(const SaveTo& save);

// Calls `save` on the root, twice, and `load` on the others. Collective; `call` is what the user
// called, for texts, and `name` the key, empty for the order of calls. What either throws, all
// ranks throw as InvalidArgument. With one rank neither is called.
void BroadcastArchive(const SaveTo& save, const LoadFrom& load, int root_rank,
                      const std::string& call, const std::string& name, const SessionSet& set);

// One of several archives that are given at once: `save` writes it on the root, and `load` takes it on the
// others. Bytes that are no archive travel as they are.
struct SavedPart {
  SaveTo save;
  LoadFrom load;
};

// Gives all ranks of the set several archives of the root, in their order, and the root's values of tensors. Waits
// three times: for the skeletons of all, for all the rest, and for errors, which all ranks throw. `call`
// is the name of all keys, too.
void BroadcastTogether(const std::vector<SavedPart>& parts, const std::vector<at::Tensor>& tensors,
                       int root_rank, const std::string& call, const SessionSet& set);

// Returns what ranks compare before one gives its optimizer's state to the others.
std::vector<std::string> DescribeForRanks(const torch::optim::Optimizer& optimizer);

// Returns how one rank gives its optimizer's state to the others: as SaveOptimizer and LoadOptimizer, but of a sharded
// one that has made a step the options alone. `optimizer` must outlive it.
SavedPart PartForRanks(torch::optim::Optimizer& optimizer);

}  // namespace sirtaki::detail
