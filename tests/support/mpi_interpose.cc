#include "tests/support/mpi_interpose.h"

#include <mpi.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <limits>

namespace sirtaki::tests {
namespace {

struct Order {
  std::atomic<std::int64_t> made{0};
  std::atomic<std::int64_t> fail_from{std::numeric_limits<std::int64_t>::max()};
  std::atomic<int> code{MPI_SUCCESS};
  std::atomic<MpiFailure> failure{MpiFailure::kInstead};
};
std::array<Order, kMpiCallCount> orders;

Order& Of(MpiCall call) { return orders[static_cast<std::size_t>(call)]; }

template <typename Function>
int Pass(MpiCall call, const Function& make, const int* done = nullptr) {
  Order& order = Of(call);
  const bool fails = order.made.fetch_add(1) >= order.fail_from.load();
  if (fails && order.failure.load() == MpiFailure::kInstead) return order.code.load();
  const int code = make();
  return fails && (done == nullptr || *done != 0) ? order.code.load() : code;
}

}  // namespace

void FailMpi(MpiCall call, int code, std::int64_t skip, MpiFailure failure) {
  Order& order = Of(call);
  order.code.store(code);
  order.failure.store(failure);
  order.fail_from.store(order.made.load() + skip);
}

void MendMpi() {
  for (Order& order : orders) order.fail_from.store(std::numeric_limits<std::int64_t>::max());
}

std::int64_t MpiCallsMade(MpiCall call) { return Of(call).made.load(); }

}  // namespace sirtaki::tests

// The names and arguments are MPI's.
// NOLINTBEGIN
#define SIRTAKI_PASS_ON(call, name, ...) \
  return sirtaki::tests::Pass(sirtaki::tests::MpiCall::call, [&] { return P##name(__VA_ARGS__); })

extern "C" {

int MPI_Isend(const void* buffer, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request* request) {
  SIRTAKI_PASS_ON(kIsend, MPI_Isend, buffer, count, type, to, tag, comm, request);
}

int MPI_Irecv(void* buffer, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm,
              MPI_Request* request) {
  SIRTAKI_PASS_ON(kIrecv, MPI_Irecv, buffer, count, type, from, tag, comm, request);
}

int MPI_Improbe(int from, int tag, MPI_Comm comm, int* found, MPI_Message* message,
                MPI_Status* status) {
  SIRTAKI_PASS_ON(kImprobe, MPI_Improbe, from, tag, comm, found, message, status);
}

int MPI_Imrecv(void* buffer, int count, MPI_Datatype type, MPI_Message* message,
               MPI_Request* request) {
  SIRTAKI_PASS_ON(kImrecv, MPI_Imrecv, buffer, count, type, message, request);
}

int MPI_Test(MPI_Request* request, int* done, MPI_Status* status) {
  return sirtaki::tests::Pass(
      sirtaki::tests::MpiCall::kTest, [&] { return PMPI_Test(request, done, status); }, done);
}

int MPI_Wait(MPI_Request* request, MPI_Status* status) {
  SIRTAKI_PASS_ON(kWait, MPI_Wait, request, status);
}

int MPI_Reduce(const void* input, void* output, int count, MPI_Datatype type, MPI_Op op, int root,
               MPI_Comm comm) {
  SIRTAKI_PASS_ON(kReduce, MPI_Reduce, input, output, count, type, op, root, comm);
}

int MPI_Ireduce(const void* input, void* output, int count, MPI_Datatype type, MPI_Op op, int root,
                MPI_Comm comm, MPI_Request* request) {
  SIRTAKI_PASS_ON(kIreduce, MPI_Ireduce, input, output, count, type, op, root, comm, request);
}

int MPI_Allreduce(const void* input, void* output, int count, MPI_Datatype type, MPI_Op op,
                  MPI_Comm comm) {
  SIRTAKI_PASS_ON(kAllreduce, MPI_Allreduce, input, output, count, type, op, comm);
}

int MPI_Iallreduce(const void* input, void* output, int count, MPI_Datatype type, MPI_Op op,
                   MPI_Comm comm, MPI_Request* request) {
  SIRTAKI_PASS_ON(kIallreduce, MPI_Iallreduce, input, output, count, type, op, comm, request);
}

int MPI_Bcast(void* buffer, int count, MPI_Datatype type, int root, MPI_Comm comm) {
  SIRTAKI_PASS_ON(kBcast, MPI_Bcast, buffer, count, type, root, comm);
}

int MPI_Ibcast(void* buffer, int count, MPI_Datatype type, int root, MPI_Comm comm,
               MPI_Request* request) {
  SIRTAKI_PASS_ON(kIbcast, MPI_Ibcast, buffer, count, type, root, comm, request);
}

int MPI_Allgather(const void* input, int count, MPI_Datatype type, void* output, int out_count,
                  MPI_Datatype out_type, MPI_Comm comm) {
  SIRTAKI_PASS_ON(kAllgather, MPI_Allgather, input, count, type, output, out_count, out_type, comm);
}

int MPI_Iallgather(const void* input, int count, MPI_Datatype type, void* output, int out_count,
                   MPI_Datatype out_type, MPI_Comm comm, MPI_Request* request) {
  SIRTAKI_PASS_ON(kIallgather, MPI_Iallgather, input, count, type, output, out_count, out_type,
                  comm, request);
}

int MPI_Allgatherv(const void* input, int count, MPI_Datatype type, void* output,
                   const int counts[], const int places[], MPI_Datatype out_type, MPI_Comm comm) {
  SIRTAKI_PASS_ON(kAllgatherv, MPI_Allgatherv, input, count, type, output, counts, places, out_type,
                  comm);
}

int MPI_Iallgatherv(const void* input, int count, MPI_Datatype type, void* output,
                    const int counts[], const int places[], MPI_Datatype out_type, MPI_Comm comm,
                    MPI_Request* request) {
  SIRTAKI_PASS_ON(kIallgatherv, MPI_Iallgatherv, input, count, type, output, counts, places,
                  out_type, comm, request);
}

int MPI_Alltoall(const void* input, int count, MPI_Datatype type, void* output, int out_count,
                 MPI_Datatype out_type, MPI_Comm comm) {
  SIRTAKI_PASS_ON(kAlltoall, MPI_Alltoall, input, count, type, output, out_count, out_type, comm);
}

int MPI_Ialltoall(const void* input, int count, MPI_Datatype type, void* output, int out_count,
                  MPI_Datatype out_type, MPI_Comm comm, MPI_Request* request) {
  SIRTAKI_PASS_ON(kIalltoall, MPI_Ialltoall, input, count, type, output, out_count, out_type, comm,
                  request);
}

int MPI_Comm_idup(MPI_Comm comm, MPI_Comm* duplicate, MPI_Request* request) {
  SIRTAKI_PASS_ON(kCommIdup, MPI_Comm_idup, comm, duplicate, request);
}

int MPI_Comm_split_type(MPI_Comm comm, int type, int key, MPI_Info info, MPI_Comm* made) {
  SIRTAKI_PASS_ON(kCommSplitType, MPI_Comm_split_type, comm, type, key, info, made);
}

int MPI_Comm_create_group(MPI_Comm comm, MPI_Group group, int tag, MPI_Comm* made) {
  SIRTAKI_PASS_ON(kCommCreateGroup, MPI_Comm_create_group, comm, group, tag, made);
}

int MPI_Comm_free(MPI_Comm* comm) { SIRTAKI_PASS_ON(kCommFree, MPI_Comm_free, comm); }

int MPI_Finalize() { SIRTAKI_PASS_ON(kFinalize, MPI_Finalize, ); }

}  // extern "C"
// NOLINTEND
