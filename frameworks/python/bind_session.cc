#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "frameworks/python/bindings.h"
#include "frameworks/python/handle.h"
#include "ops/nccl/nccl_api.h"
#include "sirtaki/detail/elastic_calls.h"
#include "sirtaki/detail/mpi_calls.h"
#include "sirtaki/detail/shard_copies.h"
#include "sirtaki/random.h"
#include "sirtaki/session.h"

namespace sirtaki::python {

namespace py = pybind11;

namespace {

void Init(const std::vector<std::pair<std::string, std::string>>& options,
          const std::vector<std::vector<int>>& process_sets, std::optional<int> communicator) {
  InitOptions init_options;
  for (const auto& [name, value] : options) init_options.set(name, value);
  for (const std::vector<int>& ranks : process_sets) init_options.process_set(ranks);
  if (communicator) return detail::InitOn(*communicator, init_options);
  init(init_options);
}

// Ends with close(), and not when Python lets it go.
class ElasticRun {
 public:
  bool GoesOnAfterError(bool peer_lost, std::int64_t reached) {
    return run_->GoesOnAfterError(peer_lost, reached);
  }
  void Close() { run_.reset(); }

 private:
  std::unique_ptr<detail::ElasticRun> run_ = std::make_unique<detail::ElasticRun>();
};

py::list BytesOf(const detail::ShardCopies::Shards& shards) {
  py::list list;
  for (const std::string& one : shards) list.append(py::bytes(one));
  return list;
}

// The list lets go of each: there are no two of them.
detail::ShardCopies::Shards TakeShards(const py::list& list) {
  detail::ShardCopies::Shards shards;
  for (std::size_t i = 0; i < list.size(); ++i) {
    shards.push_back(list[i].cast<std::string>());
    list[i] = py::none();
  }
  return shards;
}

void BindShardCopies(py::module_& module) {
  using detail::ShardCopies;
  py::class_<ShardCopies>(module, "ShardCopies")
      .def(py::init<>())
      .def("keep",
           [](ShardCopies& copies, std::int64_t place, const py::list& mine, bool to_partner) {
             ShardCopies::Shards taken = TakeShards(mine);
             Released([&] { copies.Keep(place, std::move(taken), to_partner); });
           })
      .def("keep_for_change",
           [](ShardCopies& copies, std::int64_t place, const py::list& mine) {
             ShardCopies::Shards taken = TakeShards(mine);
             Released([&] { copies.KeepForChange(place, std::move(taken)); });
           })
      .def("confirm", &ShardCopies::Confirm, WithoutGil())
      .def("bytes_kept", &ShardCopies::bytes)
      .def("mine", [](const ShardCopies& copies) { return BytesOf(copies.Mine()); })
      .def(
          "agree",
          [](ShardCopies& copies, std::int64_t place) {
            const ShardCopies::Boundary agreed = copies.Agree(place);
            return std::tuple(agreed.place, agreed.root, agreed.shards);
          },
          Waiting())
      .def("receive", [](const ShardCopies& copies, int shard) {
        return BytesOf(Released([&] { return copies.Receive(shard); }));
      });
}

template <void (*Do)(std::chrono::milliseconds)>
void WithTimeout(double seconds) {
  Do(Milliseconds(seconds));
}

}  // namespace

void BindSession(py::module_& module) {
  module.def("init", &Init, WithoutGil());
  module.def("shutdown", &shutdown, Waiting());
  module.def("is_initialized", &is_initialized, WithoutGil());
  module.def("rank", &rank, WithoutGil());
  module.def("size", &size, WithoutGil());
  module.def("local_rank", &local_rank, WithoutGil());
  module.def("local_size", &local_size, WithoutGil());
  module.def("cross_rank", &cross_rank, WithoutGil());
  module.def("cross_size", &cross_size, WithoutGil());
  module.def("is_homogeneous", &is_homogeneous, WithoutGil());
  module.def("abort", &sirtaki::abort, WithoutGil());
  module.def(
      "seed_all",
      [](std::uint64_t seed, bool different) {
        return seed_all(seed, different ? SeedMode::DifferentPerRank : SeedMode::EqualOnAllRanks);
      },
      WithoutGil());

  module.def("pause_mpi", &WithTimeout<detail::PauseMpi>, Waiting());
  module.def("resume_mpi", &WithTimeout<detail::ResumeMpi>, Waiting());

  module.attr("is_elastic") = detail::IsElastic();
  module.def("elastic_generation", &detail::ElasticGeneration, WithoutGil());
  module.def("elastic_tell_state", &detail::TellElasticState, WithoutGil());
  module.def("elastic_tell_cannot_go_on", &detail::TellElasticCannotGoOn, WithoutGil());
  module.def("elastic_change", &detail::ElasticChange, WithoutGil());
  module.def("check_job", &detail::CheckJob, WithoutGil());
  module.def("is_deferred", &detail::IsDeferred, WithoutGil());
  py::class_<ElasticRun>(module, "ElasticRun")
      .def(py::init<>())
      .def("goes_on_after_error", &ElasticRun::GoesOnAfterError, py::arg("peer_lost"),
           py::arg("reached"), WithoutGil())
      .def("close", &ElasticRun::Close);

  BindShardCopies(module);

  module.attr("mpi_built") = !detail::MpiModules().empty();
  module.attr("nccl_version") = ops::nccl::kDeclaredVersion;
}

}  // namespace sirtaki::python
