#include "tests/support/mpi_interpose.h"

#include <mpi.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <limits>
#include <string>
#include <thread>
#include <vector>

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

std::atomic<int> inside{0};
std::atomic<std::int64_t> beside_others{0};
std::atomic<std::int64_t> slower_by{0};    // microseconds, each call
std::atomic<std::int64_t> slower_once{0};  // the next one
std::atomic<const core::Gate*> watched_gate{nullptr};
std::atomic<std::int64_t> outside_gate{0};

bool IsElsewhere(const core::Gate* gate) { return gate != nullptr && !gate->IsHeldByThisThread(); }

class Inside {
 public:
  explicit Inside(MpiCall call) : counts_(call != MpiCall::kFinalize) {
    if (counts_ && IsElsewhere(watched_gate.load())) ++outside_gate;
    if (counts_ && inside.fetch_add(1) > 0) ++beside_others;
    if (const auto once = slower_once.exchange(0); once > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(once));
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(slower_by.load());
    while (slower_by.load() > 0 && std::chrono::steady_clock::now() < end) {
    }
  }
  ~Inside() {
    if (counts_) inside.fetch_sub(1);
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  const bool counts_;
};

std::atomic<int> damages_from{std::numeric_limits<int>::max()};

template <typename Function>
int Pass(MpiCall call, const Function& make, const int* done = nullptr) {
  const Inside inside_mpi(call);
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

void DamageMpi(int bytes) { damages_from.store(bytes); }

namespace {

struct MissedGroup {
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Group group = MPI_GROUP_NULL;
  int tag = 0;
};
MissedGroup missed_group;
std::atomic<int> misses_group{-1};  // the rank

// True on the rank that misses the group, once all others have come here.
bool MissesGroup() {
  constexpr int kTag = 77;
  const int missing = misses_group.exchange(-1);
  if (missing < 0) return false;
  int rank = 0;
  int size = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  PMPI_Comm_size(MPI_COMM_WORLD, &size);
  if (rank != missing) {
    PMPI_Send(nullptr, 0, MPI_BYTE, missing, kTag, MPI_COMM_WORLD);
    return false;
  }
  for (int others = size - 1; others > 0; --others) {
    PMPI_Recv(nullptr, 0, MPI_BYTE, MPI_ANY_SOURCE, kTag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  }
  return true;
}

}  // namespace

namespace {

std::string pretended_host;
enum class Ob1 : std::uint8_t { kAsItIs, kThere, kNotThere };
std::atomic<Ob1> ob1{Ob1::kAsItIs};

}  // namespace

void PretendHost(const std::string& name) { pretended_host = name; }

void PretendOb1(bool is_there) { ob1.store(is_there ? Ob1::kThere : Ob1::kNotThere); }

void MissGroupOn(int rank) { misses_group.store(rank); }

void MakeMissedGroup() {
  MPI_Comm made = MPI_COMM_NULL;
  PMPI_Comm_create_group(missed_group.comm, missed_group.group, missed_group.tag, &made);
  PMPI_Group_free(&missed_group.group);
}

// What is sent in place of `count` bytes.
const void* Damaged(const void* buffer, int count) {
  if (count < damages_from.load()) return buffer;
  damages_from.store(std::numeric_limits<int>::max());
  static std::vector<unsigned char>& copy = *new std::vector<unsigned char>;  // until it is sent
  const auto* const bytes = static_cast<const unsigned char*>(buffer);
  copy.assign(bytes, bytes + count);
  copy.back() ^= 1;
  return copy.data();
}

void MendMpi() {
  misses_group.store(-1);
  for (Order& order : orders) order.fail_from.store(std::numeric_limits<std::int64_t>::max());
}

std::int64_t MpiCallsBesideOthers() { return beside_others.load(); }

void WatchGate(const core::Gate* gate) { watched_gate.store(gate); }

std::int64_t MpiCallsOutsideGate() { return outside_gate.load(); }

void SlowMpi(std::chrono::microseconds by) { slower_by.store(by.count()); }

void SlowNextMpi(std::chrono::microseconds by) { slower_once.store(by.count()); }

std::int64_t MpiCallsMade(MpiCall call) { return Of(call).made.load(); }

}  // namespace sirtaki::tests

// The names and arguments are MPI's.
// NOLINTBEGIN
#define SIRTAKI_PASS_ON(call, name, ...) \
  return sirtaki::tests::Pass(sirtaki::tests::MpiCall::call, [&] { return P##name(__VA_ARGS__); })

extern "C" {

int MPI_Isend(const void* buffer, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request* request) {
  SIRTAKI_PASS_ON(kIsend, MPI_Isend, sirtaki::tests::Damaged(buffer, count), count, type, to, tag,
                  comm, request);
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

int MPI_Iallgather(const void* input, int count, MPI_Datatype type, void* output, int out_count,
                   MPI_Datatype out_type, MPI_Comm comm, MPI_Request* request) {
  SIRTAKI_PASS_ON(kIallgather, MPI_Iallgather, input, count, type, output, out_count, out_type,
                  comm, request);
}

int MPI_Iallgatherv(const void* input, int count, MPI_Datatype type, void* output,
                    const int counts[], const int places[], MPI_Datatype out_type, MPI_Comm comm,
                    MPI_Request* request) {
  SIRTAKI_PASS_ON(kIallgatherv, MPI_Iallgatherv, input, count, type, output, counts, places,
                  out_type, comm, request);
}

int MPI_Comm_idup(MPI_Comm comm, MPI_Comm* duplicate, MPI_Request* request) {
  SIRTAKI_PASS_ON(kCommIdup, MPI_Comm_idup, comm, duplicate, request);
}

int MPI_Comm_create_group(MPI_Comm comm, MPI_Group group, int tag, MPI_Comm* made) {
  return sirtaki::tests::Pass(sirtaki::tests::MpiCall::kCommCreateGroup, [&] {
    if (!sirtaki::tests::MissesGroup()) return PMPI_Comm_create_group(comm, group, tag, made);
    sirtaki::tests::missed_group = {comm, MPI_GROUP_NULL, tag};
    PMPI_Group_union(group, MPI_GROUP_EMPTY, &sirtaki::tests::missed_group.group);  // a copy
    return MPI_ERR_INTERN;
  });
}

int MPI_Comm_free(MPI_Comm* comm) { SIRTAKI_PASS_ON(kCommFree, MPI_Comm_free, comm); }

int MPI_Get_count(const MPI_Status* status, MPI_Datatype type, int* count) {
  SIRTAKI_PASS_ON(kOther, MPI_Get_count, status, type, count);
}

int MPI_Test_cancelled(const MPI_Status* status, int* cancelled) {
  SIRTAKI_PASS_ON(kOther, MPI_Test_cancelled, status, cancelled);
}

int MPI_Cancel(MPI_Request* request) { SIRTAKI_PASS_ON(kOther, MPI_Cancel, request); }

int MPI_Comm_group(MPI_Comm comm, MPI_Group* group) {
  SIRTAKI_PASS_ON(kOther, MPI_Comm_group, comm, group);
}

int MPI_Comm_compare(MPI_Comm one, MPI_Comm other, int* result) {
  SIRTAKI_PASS_ON(kOther, MPI_Comm_compare, one, other, result);
}

int MPI_Comm_get_attr(MPI_Comm comm, int key, void* value, int* found) {
  SIRTAKI_PASS_ON(kOther, MPI_Comm_get_attr, comm, key, value, found);
}

int MPI_Comm_get_errhandler(MPI_Comm comm, MPI_Errhandler* handler) {
  SIRTAKI_PASS_ON(kOther, MPI_Comm_get_errhandler, comm, handler);
}

int MPI_Comm_set_errhandler(MPI_Comm comm, MPI_Errhandler handler) {
  SIRTAKI_PASS_ON(kOther, MPI_Comm_set_errhandler, comm, handler);
}

int MPI_Get_processor_name(char* name, int* length) {
  if (!sirtaki::tests::pretended_host.empty()) {
    *length =
        static_cast<int>(sirtaki::tests::pretended_host.copy(name, MPI_MAX_PROCESSOR_NAME - 1));
    name[*length] = '\0';
    return MPI_SUCCESS;
  }
  SIRTAKI_PASS_ON(kOther, MPI_Get_processor_name, name, length);
}

int MPI_T_cvar_get_index(const char* name, int* index) {
  using sirtaki::tests::Ob1;
  const Ob1 ob1 = sirtaki::tests::ob1.load();
  if (std::string(name) != "pml_ob1_priority" || ob1 == Ob1::kAsItIs) {
    SIRTAKI_PASS_ON(kOther, MPI_T_cvar_get_index, name, index);
  }
  *index = 0;
  return ob1 == Ob1::kThere ? MPI_SUCCESS : MPI_T_ERR_INVALID_NAME;
}

int MPI_Get_library_version(char* text, int* length) {
  SIRTAKI_PASS_ON(kOther, MPI_Get_library_version, text, length);
}

int MPI_Query_thread(int* level) { SIRTAKI_PASS_ON(kOther, MPI_Query_thread, level); }

int MPI_Initialized(int* initialized) { SIRTAKI_PASS_ON(kOther, MPI_Initialized, initialized); }

int MPI_Init_thread(int* argc, char*** argv, int wanted, int* level) {
  SIRTAKI_PASS_ON(kOther, MPI_Init_thread, argc, argv, wanted, level);
}

int MPI_Is_thread_main(int* is_main) { SIRTAKI_PASS_ON(kOther, MPI_Is_thread_main, is_main); }

int MPI_Comm_rank(MPI_Comm comm, int* rank) { SIRTAKI_PASS_ON(kOther, MPI_Comm_rank, comm, rank); }

int MPI_Comm_size(MPI_Comm comm, int* size) { SIRTAKI_PASS_ON(kOther, MPI_Comm_size, comm, size); }

int MPI_Comm_test_inter(MPI_Comm comm, int* is_inter) {
  SIRTAKI_PASS_ON(kOther, MPI_Comm_test_inter, comm, is_inter);
}

int MPI_Comm_create_keyval(MPI_Comm_copy_attr_function* copy, MPI_Comm_delete_attr_function* del,
                           int* key, void* state) {
  SIRTAKI_PASS_ON(kOther, MPI_Comm_create_keyval, copy, del, key, state);
}

int MPI_Comm_free_keyval(int* key) { SIRTAKI_PASS_ON(kOther, MPI_Comm_free_keyval, key); }

int MPI_Comm_set_attr(MPI_Comm comm, int key, void* value) {
  SIRTAKI_PASS_ON(kOther, MPI_Comm_set_attr, comm, key, value);
}

int MPI_Comm_delete_attr(MPI_Comm comm, int key) {
  SIRTAKI_PASS_ON(kOther, MPI_Comm_delete_attr, comm, key);
}

int MPI_Group_range_incl(MPI_Group group, int count, int ranges[][3], MPI_Group* made) {
  SIRTAKI_PASS_ON(kOther, MPI_Group_range_incl, group, count, ranges, made);
}

int MPI_Group_free(MPI_Group* group) { SIRTAKI_PASS_ON(kOther, MPI_Group_free, group); }

int MPI_Errhandler_free(MPI_Errhandler* handler) {
  SIRTAKI_PASS_ON(kOther, MPI_Errhandler_free, handler);
}

int MPI_Error_string(int code, char* text, int* length) {
  SIRTAKI_PASS_ON(kOther, MPI_Error_string, code, text, length);
}

int MPI_Finalized(int* finalized) { SIRTAKI_PASS_ON(kOther, MPI_Finalized, finalized); }

int MPI_Finalize() { SIRTAKI_PASS_ON(kFinalize, MPI_Finalize, ); }

}  // extern "C"
// NOLINTEND
