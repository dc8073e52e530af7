#include "mpi/communicators.h"

#include <algorithm>
#include <array>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "mpi/check.h"
#include "mpi/gate.h"
#include "mpi/library.h"

namespace sirtaki::mpi {
namespace {

using core::MutexLock;
using core::RankRanges;
using core::SetNumber;
using core::Status;

// Makes a communicator of `members`, ascending. Collective over them alone.
Status CreateGroup(Comm world, const RankRanges& members, int tag, Comm* made) {
  // MPI takes triplets (first, last, stride).
  std::vector<std::array<int, 3>> triplets;
  for (const core::RankRange& range : members.ranges()) {
    triplets.push_back({range.first, range.last, 1});
  }
  Status status = InMpi("MPI_Comm_create_group", [&] {
    return TheApi().CommCreateGroup(world, static_cast<int>(triplets.size()),
                                    reinterpret_cast<int(*)[3]>(triplets.data()), tag, made);
  });
  if (!status.ok()) return status;
  return InMpi("MPI_Comm_set_errhandler", [&] { return TheApi().ReturnErrors(*made); });
}

// Sessions that have the same communicator of messages have tags of their own there, as long as MPI
// has enough of them. A session's take this many.
constexpr int kTagsOfASession = ops::Backend::kAnswerTag + 1;

// How many tags a communicator has.
Status TagsOf(Comm comm, std::int64_t* tags) {
  int highest = 0;
  bool is_known = false;
  Status status = InMpi("MPI_Comm_get_attr of MPI_TAG_UB",
                        [&] { return TheApi().HighestTag(comm, &highest, &is_known); });
  if (status.ok()) *tags = std::int64_t{is_known ? highest : kTagsOfASession - 1} + 1;
  return status;
}

// The first of the tags of the `session`th session of the communicator.
int FirstTag(std::int64_t tags, std::uint64_t session) {
  const std::int64_t sessions = std::max<std::int64_t>(1, tags / kTagsOfASession);
  return static_cast<int>(session % static_cast<std::uint64_t>(sessions)) * kTagsOfASession;
}

// The spares are what sessions that have ended have kept, by number.
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
  std::string ToString(Comm comm) const {
    MutexLock lock(mutex_);
    std::string text = std::to_string(next_);
    for (const auto& [number, kept] : spares_) {
      bool same = false;
      if (!InMpi("MPI_Comm_compare", [&, of = kept.transport] {
             return TheApi().CommIsCongruent(of, comm, &same);
           }).ok()) {
        continue;
      }
      if (same) text += ' ' + std::to_string(number);
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
  Status status =
      environment.Exchange(Spares::OfProcess().ToString(environment.control_), deadline, &told);
  if (!status.ok()) return status;

  std::unique_ptr<Communicators> made(new Communicators(topology.rank, topology.size));
  made->number_ = ChooseSpare(told);
  made->kept_ = Spares::OfProcess().Take(made->number_);
  for (Comm* target : {&made->kept_.transport, &made->kept_.messages, &made->collectives_}) {
    if (!target->is_null()) continue;
    status = DuplicateUntil(environment.control_, deadline, target);
    if (!status.ok()) return status;
  }
  status = TagsOf(made->collectives_, &made->tags_);
  if (!status.ok()) return status;
  made->first_tag_ = FirstTag(made->tags_, made->kept_.sessions++);
  *communicators = std::move(made);
  return Status::Ok();
}

Communicators::~Communicators() {
  if (Environment::HasFault() || IsFinalized()) return;
  if (!collectives_.is_null()) {
    static_cast<void>(InMpi("MPI_Comm_free", [this] { return TheApi().CommFree(&collectives_); }));
  }
  if (kept_.sessions > 0) Spares::OfProcess().Put(number_, kept_);
}

Status Communicators::MakeForProgram(Environment& environment, SetNumber set,
                                     const RankRanges& members, int* fortran_handle) {
  // Every MPI has these tags.
  const int tag = 1 + static_cast<int>(set % ops::Backend::kMaxTag);
  Comm made;
  Status status = CreateGroup(environment.control_, members, tag, &made);
  if (!status.ok()) return status;
  const Entry entry("MPI_Comm_set_errhandler");
  if (!entry.ok()) return entry.status();
  status = Check(TheApi().TakeHandlerOfWorld(made), "MPI_Comm_set_errhandler");
  *fortran_handle = TheApi().ToNumber(made);
  return status;
}

}  // namespace sirtaki::mpi
