// A checkpoint saves a training run, so that it can go on later:
//
//   std::int64_t epoch = 0;
//   double best = 0;
//   const auto checkpoint = sirtaki::Checkpoint()
//                               .model(*net)
//                               .optimizer(optimizer)
//                               .scheduler(scheduler)
//                               .sampler(sampler)
//                               .epoch(epoch)
//                               .value("best accuracy", best);
//   sirtaki::load_checkpoint("run/last.pt", checkpoint);   // false if there is none yet
//   for (; epoch < epochs;) {
//     …
//     ++epoch;
//     sirtaki::save_checkpoint("run/last.pt", checkpoint);
//   }
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "sirtaki/export.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
class LRScheduler;
class ReduceLROnPlateauScheduler;
}  // namespace torch::optim
namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace sirtaki {

namespace detail {

template <class T>
struct NamedPart {
  std::string name;
  T part;
};

struct ArchivedObject {
  std::function<void(torch::serialize::OutputArchive&)> save;
  std::function<void(torch::serialize::InputArchive&)> load;
};

// What a Checkpoint refers to, in the order in which it was given.
struct CheckpointParts {
  std::vector<NamedPart<torch::nn::Module*>> models;
  std::vector<NamedPart<torch::optim::Optimizer*>> optimizers;
  std::vector<NamedPart<
      std::variant<torch::optim::LRScheduler*, torch::optim::ReduceLROnPlateauScheduler*>>>
      schedulers;
  std::vector<NamedPart<std::variant<std::int64_t*, double*, std::string*, at::Tensor*>>> values;
  std::vector<NamedPart<ArchivedObject>> objects;
  std::vector<NamedPart<at::Generator>> generators;
};

}  // namespace detail

// A Checkpoint lists the parts of a program that make up a run. It holds references, which must be
// valid whenever it is used. Several parts of one kind need different names.
class Checkpoint {
 public:
  // The module's parameters and buffers are saved, on whatever device they are.
  Checkpoint& model(torch::nn::Module& module, std::string name = "model") {
    parts_.models.push_back({std::move(name), &module});
    return *this;
  }
  // The optimizer's state and options (learning rates too) are saved, by its own save() and load().
  Checkpoint& optimizer(torch::optim::Optimizer& optimizer, std::string name = "optimizer") {
    parts_.optimizers.push_back({std::move(name), &optimizer});
    return *this;
  }
  // The number of the scheduler's steps is saved. For a scheduler of your own that remembers more
  // see object().
  Checkpoint& scheduler(torch::optim::LRScheduler& scheduler, std::string name = "scheduler") {
    parts_.schedulers.push_back({std::move(name), &scheduler});
    return *this;
  }
  // The scheduler's best metric so far and its counters are saved.
  Checkpoint& scheduler(torch::optim::ReduceLROnPlateauScheduler& scheduler,
                        std::string name = "scheduler") {
    parts_.schedulers.push_back({std::move(name), &scheduler});
    return *this;
  }
  // Takes a DistributedSampler, or any other sampler with the save() and load() of LibTorch's
  // samplers. Give the one that the program keeps, not a data loader's copy.
  template <class Sampler>
  Checkpoint& sampler(Sampler& sampler, std::string name = "sampler") {
    return object(std::move(name), sampler);
  }
  // Takes any object with these two functions. Rank 0's object is saved, and all ranks load it.
  //
  //   void save(torch::serialize::OutputArchive&) const;
  //   void load(torch::serialize::InputArchive&);
  template <class Object>
  Checkpoint& object(std::string name, Object& object) {
    detail::ArchivedObject part;
    part.save = [&object](torch::serialize::OutputArchive& archive) { object.save(archive); };
    part.load = [&object](torch::serialize::InputArchive& archive) { object.load(archive); };
    parts_.objects.push_back({std::move(name), std::move(part)});
    return *this;
  }
  Checkpoint& epoch(std::int64_t& epoch) { return value("epoch", epoch); }
  // Rank 0's value is saved, and all ranks get it. A loaded tensor may have another shape than the
  // one that it replaces, and comes to that one's device.
  Checkpoint& value(std::string name, std::int64_t& value) { return Add(std::move(name), &value); }
  Checkpoint& value(std::string name, double& value) { return Add(std::move(name), &value); }
  Checkpoint& value(std::string name, std::string& value) { return Add(std::move(name), &value); }
  Checkpoint& value(std::string name, at::Tensor& value) { return Add(std::move(name), &value); }
  // Adds a generator of your own. LibTorch's default generators, for the CPU and for the GPUs that
  // the models are on, are always part of a checkpoint.
  Checkpoint& generator(std::string name, at::Generator generator) {
    parts_.generators.push_back({std::move(name), std::move(generator)});
    return *this;
  }

  const detail::CheckpointParts& parts() const { return parts_; }

 private:
  template <class T>
  Checkpoint& Add(std::string name, T* value) {
    parts_.values.push_back({std::move(name), value});
    return *this;
  }

  detail::CheckpointParts parts_;
};

struct CheckpointOptions {
  // If true, save_checkpoint() returns when each rank has copied what it writes, and a thread of
  // each writes it while the program goes on: what the program changes from then on is not in the
  // file. The file at the path is the new one when all ranks have written, also if the program does
  // nothing for it. The next save_checkpoint(), load_checkpoint() or finish_checkpoint() waits for
  // that, and throws what went wrong, on every rank; shutdown() and the end of the program wait, and
  // log it. Each rank needs memory for its copy meanwhile.
  TORCH_ARG(bool, write_behind) = false;
  // The most that a rank waits for its disk, of what is written behind; 0: the job's stall_limit. A
  // save that is too late on one rank is given up on all, and the file at the path stays.
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::milliseconds(0);
};

// Writes the checkpoint to the file `path` on rank 0's host. Collective over all ranks of the job,
// not for a process set; the ranks must name the same parts. Rank 0's parts are saved (with op
// Adasum its momentum stands for that of all ranks), except that the states of the random
// generators are saved for every rank.
//
// A crash at any moment leaves either the old file or the new one: the new one is written as
// `path`.NUMBER.tmp, brought to the disk and then renamed. The next save removes
// what an earlier crash has left.
//
// Every rank throws InvalidArgument, with path and cause, if the file cannot be written or a part
// cannot be saved; Mismatch if the ranks name different parts; a fault's own code if there was one.
// The old file then stays, unless the error is one of the folder after the file was replaced.
//
// The file is an archive of torch::serialize, which Python's torch.jit.load opens; see
// docs/checkpoints.md.
SIRTAKI_API void save_checkpoint(const std::string& path, const Checkpoint& checkpoint,
                                 const CheckpointOptions& options = {});

// Waits until the last save with `write_behind` is complete; does nothing if there is none to wait
// for. Collective. If a rank could not write its part every rank throws InvalidArgument, with path
// and cause, and the checkpoint before it stays; a fault's own code if there was one.
SIRTAKI_API void finish_checkpoint();

// Restores all parts on all ranks from the file `path`, which only rank 0 reads: only rank 0's host
// needs it. Returns false on all ranks, and changes nothing, if there is no such file. Collective.
//
// A run that goes on from a checkpoint does, bit by bit, what an uninterrupted run does, if it has
// as many ranks (three or more over MPI: with the options that docs/training.md names). With
// another number of ranks the random generators are seeded again (always in the same way), with a
// warning in the log; DistributedSampler::load says what a sampler does.
//
// Buffers that differ between ranks (running means of batch norm) become rank 0's.
//
// Every rank throws InvalidArgument if the file is damaged, is of a newer version of the library,
// lacks one of the parts, or is of another model or optimizer (names, shapes or types; the first
// difference is named); Mismatch if the ranks name different parts. Then nothing has been changed
// on any rank. Parts of the file that are not asked for are left alone.
SIRTAKI_API bool load_checkpoint(const std::string& path, const Checkpoint& checkpoint);

}  // namespace sirtaki
