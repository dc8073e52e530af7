// Elastic training goes on when ranks are lost and when ranks come: see docs/elastic.md.
//
//   std::int64_t epoch = 0;
//   auto state = sirtaki::elastic::State()
//                    .model(*net)
//                    .optimizer(optimizer)
//                    .sampler(sampler)
//                    .value("epoch", epoch);
//   sirtaki::elastic::run(state, [&] {
//     while (epoch < epochs) {
//       …
//       ++epoch;
//       state.commit();
//     }
//   });
//
// In a job whose ranks are fixed the same program goes on after an error that all ranks survive.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "sirtaki/checkpoint.h"
#include "sirtaki/detail/elastic_calls.h"
#include "sirtaki/detail/elastic_parts.h"
#include "sirtaki/error.h"
#include "sirtaki/export.h"
#include "sirtaki/sampler.h"

namespace sirtaki {

namespace elastic {

// Says whether sirtakirun has started this process for an elastic job. Before init(), too.
SIRTAKI_API bool is_elastic();

// The number of the generation that this process trains in, from 1; 0 outside of an elastic job, and
// before init().
SIRTAKI_API int generation();

// HostsUpdated says that ranks are to come or to go. It is no Error: nothing has failed. run() catches
// it, and what catches every exception within `train` must let it through.
class SIRTAKI_API HostsUpdated : public std::runtime_error {
 public:
  HostsUpdated();
  HostsUpdated(const HostsUpdated&) noexcept;
  HostsUpdated& operator=(const HostsUpdated&) noexcept;
  ~HostsUpdated() override;
};

// A State lists what a training has reached. It holds references, which must be valid as long as it
// is used; copies of a State are the same state. All ranks give the same parts in the same order,
// which is also the order in which optimizers and modules are made in each new generation. Parts of
// one kind need different names. Functions throw InvalidArgument for a name that is there already.
//
// Used by the thread that trains.
class SIRTAKI_API State {
 public:
  State();

  // The module's parameters and buffers. A DistributedDataParallel, that module or one in it, is made
  // for each new generation again.
  State& model(torch::nn::Module& module, const std::string& name = "model");
  template <class Contained>
  State& model(torch::nn::ModuleHolder<Contained>& holder, const std::string& name = "model") {
    return model(*holder, name);
  }

  // The optimizer's state and options, by its own save() and load(). A DistributedOptimizer is made
  // for each new generation again, any other optimizer stays as it is; gradients of both are let go
  // then. The state of a sharded one is kept as copy_shards() says. Throws Unsupported for one that is
  // sharded in a job that is not elastic, or that averages over a process set.
  State& optimizer(torch::optim::Optimizer& optimizer, const std::string& name = "optimizer");

  // How many steps the scheduler has made, and a metric that it remembers.
  State& scheduler(torch::optim::LRScheduler& scheduler, const std::string& name = "scheduler");
  State& scheduler(torch::optim::ReduceLROnPlateauScheduler& scheduler,
                   const std::string& name = "scheduler");

  // The sampler's epoch and position. In a new generation what is left of the epoch is shared out
  // among its ranks. A data loader has a copy of the sampler: `train` makes the loader again from
  // this one, and set_position() tells this one what is done before each step(), commit() and
  // check_changes().
  State& sampler(DistributedSampler& sampler, const std::string& name = "sampler");

  // Any object that Checkpoint::object() takes.
  template <class Object>
  State& object(const std::string& name, Object& object) {
    detail::ArchivedObject archived;
    archived.save = [&object](torch::serialize::OutputArchive& archive) { object.save(archive); };
    archived.load = [&object](torch::serialize::InputArchive& archive) { object.load(archive); };
    return AddObject("object", name, std::move(archived), nullptr);
  }

  // A number, a bool, a std::string, an at::Tensor, or anything that broadcast_object() takes. A
  // tensor, also in a std::vector or a c10::IValue, is replaced by another one when it is restored or
  // received, on the device of the one that was there.
  template <class T>
  State& value(const std::string& name, T& value) {
    if constexpr (std::is_same_v<T, at::Tensor>) {
      return Add(detail::ElasticTensorPart(name, value));
    } else if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T> ||
                         std::is_same_v<T, std::string>) {
      return Add(detail::ElasticPlainPart(name, value));
    } else {
      return Add(detail::ElasticSavedPart(name, value));
    }
  }

  // The function is called each time that the job was joined again, before ranks get the state of one
  // of them. rank() and size() may be others then. Functions are called in the order in which they were
  // given.
  State& on_change(std::function<void()> callback);

  // Says whether the state of LibTorch's own generators, of the CPU and of the GPUs that the state lies
  // on, is kept at each step(), commit() and sync(), and comes back when run() goes back there after a
  // loss: draws, as those of dropout, are the same again. It does by default; each rank keeps its own,
  // about 5 KB, and restore() leaves it alone.
  State& keep_random_state(bool keeps);

  // Says how often the partner of each rank, on another host if there is one, gets a copy of that rank's
  // shards of the optimizers' state: at each commit() where it is 0, the default; at each of so many
  // calls of step() as well where it is more, each of which then is a commit() that does not call
  // check_changes(); never where it is -1. When ranks are lost, the training goes on from the last
  // commit() of which each shard or a copy of it is left; without one run() throws InvalidArgument on all
  // ranks. A rank has copies as large as its own shards in the commit, and as many of others', twice that
  // while it commits. All ranks say the same. Throws InvalidArgument for numbers below -1.
  State& copy_shards(std::int64_t every_steps);

  // Marks that a step is made, with all that the program notes of it. After a loss run() goes back to the
  // last step() of a rank that is left, where that came after the last commit(). It keeps a copy of
  // everything but the optimizers' parameters and state, which lie there unchanged until the next step of
  // an optimizer; ranks that have begun that, or have changed such a parameter otherwise (which a write
  // through its data() hides), take the state of one that has not, or has called step() again. So it costs
  // little where values, buffers and the parameters that no optimizer has are small; it waits for each
  // GPU that the state lies on. It does nothing, and a warning on rank 0 names the reason once, where the
  // state has an optimizer that is no DistributedOptimizer, one with parameters of no model, or models
  // with trained parameters of no optimizer, or a sharded optimizer that copy_shards() gives no number of
  // steps; run() then goes back to the last commit(). After a fault of the job it throws that. All ranks
  // call it alike; not collective, but for the steps of copy_shards().
  void step();

  // Copies all parts in memory, for restore() to bring them back, then calls check_changes(). What was
  // trained since the last commit() is lost with a rank. After a fault of the job it throws that, and
  // the copy of before stays. Collective in an elastic job.
  void commit();

  // Throws HostsUpdated, on all ranks at once, where ranks are to come or to go; with a sharded optimizer
  // it commits before, and gives copies of shards to ranks that stay. Costs a broadcast of one byte.
  // Collective in an elastic job; elsewhere it does nothing.
  void check_changes();

  // Brings back what was copied last: by commit(), by sync() or at the beginning of run(). Throws
  // InvalidArgument if there is no copy. Not collective.
  void restore();

  // Gives all ranks what rank 0 has, and copies it. Collective. Throws Mismatch on every rank, and
  // changes nothing, if the ranks have other parts, names or types.
  void sync();

  std::int64_t commits() const;  // calls of commit()

 private:
  friend class detail::ElasticAttempts;
  struct Impl;
  State& Add(detail::ElasticPart part);
  State& AddObject(const char* kind, const std::string& name, detail::ArchivedObject object,
                   std::function<void()> renew);

  std::shared_ptr<Impl> impl_;
};

}  // namespace elastic

namespace detail {

// ElasticAttempts decide for run() whether and how a training goes on.
class SIRTAKI_API ElasticAttempts {
 public:
  explicit ElasticAttempts(elastic::State state);
  // Before each call of the training. Joins the job again unless it is the first.
  void Begin();
  void NoteChange() { joins_again_ = true; }
  // The next Begin() restores the state. False: the error is the caller's.
  bool NoteError(const Error& error);

 private:
  ElasticRun run_;
  elastic::State state_;
  bool joins_again_ = false;
  bool restores_ = false;
  bool sets_up_ = IsElastic();  // what was made before run()
};

}  // namespace detail

namespace elastic {

// Gives all ranks the state of the lowest rank that is farthest, of rank 0 at first, calls `train()` and
// returns what that returns. Collective.
//
// Where `train` throws an Error that ends the job (PeerLost, TimedOut, Aborted, Backend, Protocol or
// ShutDown), all ranks join the job again with the options of the last init(), and go back to what was
// committed last (State::restore()), or to the last State::step(). After HostsUpdated they do the same
// without going back, unless an optimizer of the state is sharded: its shards are those of the last
// commit. Then they make optimizers and modules of the state again, call its on_change() functions, get
// the state of the lowest rank that is farthest, and call `train` again. Every other exception is the
// caller's. So is an error that comes three times, in an elastic job ten times, without
// a step() or commit() that is farther than before, or the loss of a rank, in between; and outside of an
// elastic job, where lost ranks do not come back, that of a rank that has ended.
//
// In an elastic job a program makes no collective calls between init() and run(): a rank that comes
// later would be alone with them. Distributed optimizers and modules that are made there are set up
// when run() begins, if they are part of the state, and throw NotInitialized until then. run() is
// called once there. Within run() it throws InvalidArgument.
template <class Train>
std::invoke_result_t<Train&> run(State state, Train&& train) {
  detail::ElasticAttempts attempts(std::move(state));
  for (;;) {
    try {
      attempts.Begin();
      return train();
    } catch (const HostsUpdated&) {
      attempts.NoteChange();
    } catch (const Error& error) {
      if (!attempts.NoteError(error)) throw;
    }
  }
}

}  // namespace elastic
}  // namespace sirtaki
