#include "mpi/operation.h"

#include <utility>

#include "mpi/check.h"
#include "mpi/environment.h"

namespace sirtaki::mpi {
namespace {

using core::Status;

Status RunBlocking(const Call& call, MPI_Comm comm) {
  switch (call.kind) {
    case Call::Kind::kAllReduce:
      return Check(MPI_Allreduce(MPI_IN_PLACE, call.output, call.count, call.type, call.op, comm),
                   "MPI_Allreduce");
    case Call::Kind::kReduce:
      return Check(
          MPI_Reduce(call.input, call.output, call.count, call.type, call.op, call.root, comm),
          "MPI_Reduce");
    case Call::Kind::kBroadcast:
      return Check(MPI_Bcast(call.output, call.count, call.type, call.root, comm), "MPI_Bcast");
    case Call::Kind::kAllGather:
      return Check(MPI_Allgather(call.input, call.count, call.type, call.output, call.count,
                                 call.type, comm),
                   "MPI_Allgather");
    case Call::Kind::kAllGatherV:
      return Check(MPI_Allgatherv(call.input, call.count, call.type, call.output,
                                  call.counts.data(), call.displacements.data(), call.type, comm),
                   "MPI_Allgatherv");
    case Call::Kind::kAllToAll:
      return Check(
          MPI_Alltoall(call.input, call.count, call.type, call.output, call.count, call.type, comm),
          "MPI_Alltoall");
  }
  return Status::Ok();
}

Status StartPolled(const Call& call, MPI_Comm comm, MPI_Request* request) {
  switch (call.kind) {
    case Call::Kind::kAllReduce:
      return Check(
          MPI_Iallreduce(MPI_IN_PLACE, call.output, call.count, call.type, call.op, comm, request),
          "MPI_Iallreduce");
    case Call::Kind::kReduce:
      return Check(MPI_Ireduce(call.input, call.output, call.count, call.type, call.op, call.root,
                               comm, request),
                   "MPI_Ireduce");
    case Call::Kind::kBroadcast:
      return Check(MPI_Ibcast(call.output, call.count, call.type, call.root, comm, request),
                   "MPI_Ibcast");
    case Call::Kind::kAllGather:
      return Check(MPI_Iallgather(call.input, call.count, call.type, call.output, call.count,
                                  call.type, comm, request),
                   "MPI_Iallgather");
    case Call::Kind::kAllGatherV:
      return Check(
          MPI_Iallgatherv(call.input, call.count, call.type, call.output, call.counts.data(),
                          call.displacements.data(), call.type, comm, request),
          "MPI_Iallgatherv");
    case Call::Kind::kAllToAll:
      return Check(MPI_Ialltoall(call.input, call.count, call.type, call.output, call.count,
                                 call.type, comm, request),
                   "MPI_Ialltoall");
  }
  return Status::Ok();
}

const char* TestName(Call::Kind kind) {
  switch (kind) {
    case Call::Kind::kAllReduce:
      return "MPI_Test of MPI_Iallreduce";
    case Call::Kind::kReduce:
      return "MPI_Test of MPI_Ireduce";
    case Call::Kind::kBroadcast:
      return "MPI_Test of MPI_Ibcast";
    case Call::Kind::kAllGather:
      return "MPI_Test of MPI_Iallgather";
    case Call::Kind::kAllGatherV:
      return "MPI_Test of MPI_Iallgatherv";
    case Call::Kind::kAllToAll:
      return "MPI_Test of MPI_Ialltoall";
  }
  return "MPI_Test";
}

// Reachable, so that no tool takes it for a leak.
void KeepForever(std::vector<Call> calls) {
  static auto& kept = *new std::vector<std::vector<Call>>;
  static core::Mutex& mutex = *new core::Mutex;
  core::MutexLock lock(mutex);
  kept.push_back(std::move(calls));
}

}  // namespace

SliceType::SliceType(std::int64_t bytes, std::int64_t stride) {
  MPI_Datatype slice = MPI_DATATYPE_NULL;
  status_ =
      Check(MPI_Type_contiguous(static_cast<int>(bytes), MPI_BYTE, &slice), "MPI_Type_contiguous");
  if (!status_.ok()) return;
  status_ = Check(MPI_Type_create_resized(slice, 0, static_cast<MPI_Aint>(stride), &type_),
                  "MPI_Type_create_resized");
  if (status_.ok()) status_ = Check(MPI_Type_commit(&type_), "MPI_Type_commit");
  MPI_Type_free(&slice);
}

SliceType::~SliceType() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (type_ != MPI_DATATYPE_NULL && finalized == 0) MPI_Type_free(&type_);
}

void StopSign::Set(const Status& why) {
  core::MutexLock lock(mutex_);
  if (is_set_.load()) return;
  why_ = why;
  is_set_.store(true);
}

Status StopSign::Get() const {
  if (!is_set_.load()) return Status::Ok();
  core::MutexLock lock(mutex_);
  return why_;
}

Operation::Operation(MPI_Comm comm, Mode mode, std::shared_ptr<const StopSign> stop,
                     std::vector<Call> calls)
    : comm_(comm), stop_(std::move(stop)), calls_(std::move(calls)) {
  if (mode == Mode::kPolled) {
    StartNext();
    return;
  }
  for (const Call& call : calls_) {
    Status status = stop_->Get();
    if (status.ok()) {
      started_ = true;
      status = RunBlocking(call, comm_);
    }
    if (!status.ok()) {
      Finish(std::move(status));
      return;
    }
  }
  Finish(Status::Ok());
}

Operation::Operation(Status why) { Finish(std::move(why)); }

Operation::~Operation() {
  if (finished_ && (status_.ok() || !started_)) return;
  // A collective cannot be called back: MPI may use its arrays (and the tensors, which the lane
  // keeps) whenever it makes progress, and after an error, too.
  Environment::NoteFault();
  KeepForever(std::move(calls_));
}

void Operation::Finish(Status status) {
  // After an error MPI may go on with a call that is over for us: what it uses must not be freed
  // (see the destructor).
  if (!status.ok() && comm_ != MPI_COMM_NULL) Environment::NoteFault();
  status_ = std::move(status);
  finished_ = true;
}

void Operation::StartNext() {
  if (next_ == calls_.size()) {
    Finish(Status::Ok());
    return;
  }
  Status status = stop_->Get();
  if (status.ok()) {
    started_ = true;
    status = StartPolled(calls_[next_++], comm_, &request_);
  }
  if (!status.ok()) Finish(std::move(status));
}

bool Operation::Poll() {
  while (!finished_) {
    int done = 0;
    Status status =
        Check(MPI_Test(&request_, &done, MPI_STATUS_IGNORE), TestName(calls_[next_ - 1].kind));
    if (!status.ok()) {
      Finish(std::move(status));
      break;
    }
    if (done == 0) return false;
    StartNext();
  }
  return true;
}

}  // namespace sirtaki::mpi
