#include "mpi/communicators.h"

#include <algorithm>
#include <array>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "mpi/check.h"
#include "mpi/environment_impl.h"

namespace sirtaki::mpi {
namespace {

using core::MutexLock;
using core::RankRanges;
using core::SetNumber;
using core::Status;

// Makes a communicator of `members`, ascending. Collective over them alone.
Status CreateGroup(MPI_Comm world, const RankRanges& members, int tag, MPI_Comm* made) {
  // MPI takes triplets (first, last, stride).
  std::vector<std::array<int, 3>> triplets;
  for (const core::RankRange& range : members.ranges()) {
    triplets.push_back({range.first, range.last, 1});
  }
  MPI_Group all = MPI_GROUP_NULL;
  MPI_Group some = MPI_GROUP_NULL;
  Status status = Check(MPI_Comm_group(world, &all), "MPI_Comm_group");
  if (!status.ok()) return status;
  status = Check(MPI_Group_range_incl(all, static_cast<int>(triplets.size()),
                                      reinterpret_cast<int(*)[3]>(triplets.data()), &some),
                 "MPI_Group_range_incl");
  if (status.ok()) {
    status = Check(MPI_Comm_create_group(world, some, tag, made), "MPI_Comm_create_group");
  }
  if (status.ok()) {
    status = Check(MPI_Comm_set_errhandler(*made, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  }
  if (some != MPI_GROUP_NULL) MPI_Group_free(&some);
  MPI_Group_free(&all);
  return status;
}

// Sessions that have the same communicator of messages have tags of their own there, as long as MPI
// has enough of them. A session's take this many.
constexpr int kTagsOfASession = ops::Backend::kMaxTag + 1;

// The first of the tags of the `session`th session of the communicator.
Status FirstTag(MPI_Comm comm, std::uint64_t session, int* tag) {
  int* highest = nullptr;
  int found = 0;
  Status status = Check(MPI_Comm_get_attr(comm, MPI_TAG_UB, static_cast<void*>(&highest), &found),
                        "MPI_Comm_get_attr of MPI_TAG_UB");
  if (!status.ok()) return status;
  const int limit = found != 0 ? *highest : kTagsOfASession - 1;
  const std::uint64_t sessions =
      std::max<std::uint64_t>(1, (static_cast<std::uint64_t>(limit) + 1) / kTagsOfASession);
  *tag = static_cast<int>(session % sessions) * kTagsOfASession;
  return Status::Ok();
}

// What sessions that have ended have kept, by number.
class Spares {
 public:
  static Spares& OfProcess() {
    static Spares& spares = *new Spares;  // sessions may end while the process exits
    return spares;
  }

  void Put(std::uint64_t number, const Communicators::Kept& kept) {
    MutexLock lock(mutex_);
    spares_[number] = kept;
  }

  // Empty if there is none of this number: then new ones get it.
  Communicators::Kept Take(std::uint64_t number) {
    MutexLock lock(mutex_);
    next_ = std::max(next_, number + 1);
    const auto found = spares_.find(number);
    if (found == spares_.end()) return {};
    const Communicators::Kept kept = found->second;
    spares_.erase(found);
    return kept;
  }

  // "7 2 5": the next new number is 7; 2 and 5 are spare, of the same ranks in the same order as
  // `comm`.
  std::string ToString(MPI_Comm comm) const {
    MutexLock lock(mutex_);
    std::string text = std::to_string(next_);
    for (const auto& [number, kept] : spares_) {
      int same = MPI_UNEQUAL;
      MPI_Comm_compare(kept.transport, comm, &same);
      if (same == MPI_CONGRUENT) text += ' ' + std::to_string(number);
    }
    return text;
  }

 private:
  mutable core::Mutex mutex_;
  std::uint64_t next_ SIRTAKI_GUARDED_BY(mutex_) = 1;
  std::map<std::uint64_t, Communicators::Kept> spares_ SIRTAKI_GUARDED_BY(mutex_);
};

// The lowest number that is spare on all ranks, else the highest next one: the same on all of them.
std::uint64_t ChooseSpare(const std::vector<std::string>& told) {
  std::map<std::uint64_t, std::size_t> ranks_with;
  std::uint64_t chosen = 0;
  for (const std::string& text : told) {
    std::istringstream numbers(text);
    std::uint64_t number = 0;
    numbers >> number;
    chosen = std::max(chosen, number);
    while (numbers >> number) ++ranks_with[number];
  }
  for (const auto& [number, ranks] : ranks_with) {
    if (ranks == told.size()) return number;
  }
  return chosen;
}

}  // namespace

Status Communicators::Make(Environment& environment, core::TimePoint deadline,
                           std::unique_ptr<Communicators>* communicators) {
  const core::Topology& topology = environment.topology();
  std::vector<std::string> told;
  Status status = environment.Exchange(Spares::OfProcess().ToString(environment.impl_->control),
                                       deadline, &told);
  if (!status.ok()) return status;

  std::unique_ptr<Communicators> made(new Communicators(topology.rank, topology.size));
  made->number_ = ChooseSpare(told);
  made->kept_ = Spares::OfProcess().Take(made->number_);
  Lanes world;
  world.small.rank = world.large.rank = topology.rank;
  world.small.size = world.large.size = topology.size;
  for (MPI_Comm* target :
       {&made->kept_.transport, &made->kept_.messages, &world.small.comm, &world.large.comm}) {
    if (*target != MPI_COMM_NULL) continue;
    status = DuplicateUntil(environment.impl_->control, deadline, target);
    if (!status.ok()) return status;
  }
  status = FirstTag(made->kept_.messages, made->kept_.sessions++, &made->first_tag_);
  if (!status.ok()) return status;
  {
    MutexLock lock(made->mutex_);
    made->lanes_[core::kWorldSet] = world;
  }
  *communicators = std::move(made);
  return Status::Ok();
}

Communicators::~Communicators() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (Environment::HasFault() || finalized != 0) return;
  MutexLock lock(mutex_);
  for (auto& [set, lanes] : lanes_) {
    for (MPI_Comm* comm : {&lanes.small.comm, &lanes.large.comm}) {
      if (*comm != MPI_COMM_NULL) MPI_Comm_free(comm);
    }
  }
  if (kept_.sessions > 0) Spares::OfProcess().Put(number_, kept_);
}

Line Communicators::For(ops::Channel channel) const {
  MutexLock lock(mutex_);
  const auto found = lanes_.find(channel.set);
  if (found == lanes_.end()) return {};
  return channel.lane == fusion::Lane::kSmall ? found->second.small : found->second.large;
}

Status Communicators::AddSet(SetNumber set, const RankRanges& members) {
  if (!members.Contains(rank_)) return Status::Ok();
  // The large lane's own communicator is idle here: its thread is the one that is in this call. Two
  // sets that share members cannot be taken for each other though they use the same tags: those
  // members make them in the same order.
  const MPI_Comm world = For({core::kWorldSet, fusion::Lane::kLarge}).comm;
  Lanes lanes;
  lanes.small.rank = lanes.large.rank = static_cast<int>(members.IndexOf(rank_));
  lanes.small.size = lanes.large.size = static_cast<int>(members.Count());
  Status status = CreateGroup(world, members, /*tag=*/1, &lanes.small.comm);
  if (status.ok()) status = CreateGroup(world, members, /*tag=*/2, &lanes.large.comm);
  if (!status.ok()) return status;
  MutexLock lock(mutex_);
  lanes_[set] = lanes;
  return Status::Ok();
}

Status Communicators::MakeForProgram(Environment& environment, SetNumber set,
                                     const RankRanges& members, int* fortran_handle) {
  // Those of different sets may be made at once by different threads; every MPI has these tags.
  const int tag = 1 + static_cast<int>(set % ops::Backend::kMaxTag);
  MPI_Comm made = MPI_COMM_NULL;
  Status status = CreateGroup(environment.impl_->control, members, tag, &made);
  MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
  if (status.ok()) {
    status = Check(MPI_Comm_get_errhandler(MPI_COMM_WORLD, &handler), "MPI_Comm_get_errhandler");
  }
  if (!status.ok()) return status;
  status = Check(MPI_Comm_set_errhandler(made, handler), "MPI_Comm_set_errhandler");
  MPI_Errhandler_free(&handler);
  *fortran_handle = MPI_Comm_c2f(made);
  return status;
}

Status Communicators::RemoveSet(SetNumber set) {
  if (set == core::kWorldSet) {
    return {core::StatusCode::kInvalidArgument, "the world cannot be removed"};
  }
  Lanes lanes;
  {
    MutexLock lock(mutex_);
    const auto found = lanes_.find(set);
    if (found == lanes_.end()) return Status::Ok();
    lanes = found->second;
    lanes_.erase(found);
  }
  if (Environment::HasFault()) return Status::Ok();  // left behind
  for (MPI_Comm* comm : {&lanes.small.comm, &lanes.large.comm}) {
    Status status = Check(MPI_Comm_free(comm), "MPI_Comm_free");
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

}  // namespace sirtaki::mpi
