// A module: the table of functions (mpi/api.h) of the MPI whose <mpi.h> this is compiled with. It
// uses nothing of the library. Its MPI is in the process before it is loaded, or linked with it.
#include <mpi.h>

#include <bit>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "mpi/api.h"

namespace {

using sirtaki::mpi::Api;
using sirtaki::mpi::Comm;
using sirtaki::mpi::Message;
using sirtaki::mpi::Received;
using sirtaki::mpi::Request;
using sirtaki::mpi::ThreadLevel;

static_assert(sizeof(MPI_Comm) <= sizeof(Comm) && sizeof(MPI_Request) <= sizeof(Request));
static_assert(MPI_SUCCESS == 0);

// MPI's handles are pointers, or numbers of 32 bits.
template <typename Mpi>
std::uintptr_t BitsOf(Mpi handle) {
  if constexpr (std::is_pointer_v<Mpi>) {
    return reinterpret_cast<std::uintptr_t>(handle);
  } else {
    return static_cast<std::make_unsigned_t<Mpi>>(handle);
  }
}

template <typename Mpi, typename Ours>
Mpi To(Ours handle, Mpi null) {
  if (handle.is_null()) return null;
  if constexpr (std::is_pointer_v<Mpi>) {
    return reinterpret_cast<Mpi>(handle.bits);
  } else {
    return static_cast<Mpi>(handle.bits);
  }
}

template <typename Ours, typename Mpi>
Ours From(Mpi handle, Mpi null) {
  return handle == null ? Ours{} : Ours{BitsOf(handle)};
}

MPI_Comm ToMpi(Comm comm) { return To<MPI_Comm>(comm, MPI_COMM_NULL); }
Comm FromMpi(MPI_Comm comm) { return From<Comm>(comm, static_cast<MPI_Comm>(MPI_COMM_NULL)); }

// Calls MPI with a handle of its own kind, and takes what that has become.
template <typename Mpi, typename Ours, typename Call>
int Through(Ours* ours, Mpi null, const Call& call) {
  Mpi handle = To<Mpi>(*ours, null);
  const int code = call(&handle);
  *ours = From<Ours>(handle, null);
  return code;
}

template <typename Call>
int ThroughRequest(Request* request, const Call& call) {
  return Through<MPI_Request>(request, MPI_REQUEST_NULL, call);
}

template <typename Call>
int Text(char* text, int bytes, char* whole, const Call& call) {
  int length = 0;
  const int code = call(whole, &length);
  if (code != MPI_SUCCESS || length < 0) return code;
  const auto most = static_cast<std::size_t>(bytes - 1);
  const std::size_t count = static_cast<std::size_t>(length) < most ? length : most;
  std::memcpy(text, whole, count);
  text[count] = '\0';
  return code;
}

int GetLibraryVersion(char* text, int bytes) {
  char whole[MPI_MAX_LIBRARY_VERSION_STRING + 1] = {};
  return Text(text, bytes, whole, MPI_Get_library_version);
}

int ErrorString(int error, char* text, int bytes) {
  char whole[MPI_MAX_ERROR_STRING + 1] = {};
  return Text(text, bytes, whole,
              [error](char* into, int* length) { return MPI_Error_string(error, into, length); });
}

int GetProcessorName(char* text, int bytes) {
  char whole[MPI_MAX_PROCESSOR_NAME + 1] = {};
  return Text(text, bytes, whole, MPI_Get_processor_name);
}

ThreadLevel ToLevel(int level) {
  return level == MPI_THREAD_MULTIPLE     ? ThreadLevel::kMultiple
         : level == MPI_THREAD_SERIALIZED ? ThreadLevel::kSerialized
         : level == MPI_THREAD_FUNNELED   ? ThreadLevel::kFunneled
                                          : ThreadLevel::kSingle;
}

int InitThread(ThreadLevel* level) {
  int got = MPI_THREAD_SINGLE;
  const int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &got);
  *level = ToLevel(got);
  return code;
}

int QueryThread(ThreadLevel* level) {
  int got = MPI_THREAD_SINGLE;
  const int code = MPI_Query_thread(&got);
  *level = ToLevel(got);
  return code;
}

bool HasVariable(const char* name) {
  int level = MPI_THREAD_SINGLE;
  if (MPI_T_init_thread(MPI_THREAD_SERIALIZED, &level) != MPI_SUCCESS) return false;
  int index = 0;
  const bool is_there = MPI_T_cvar_get_index(name, &index) == MPI_SUCCESS;
  MPI_T_finalize();
  return is_there;
}

// MPI_Finalize frees MPI_COMM_SELF before anything else, which deletes its attributes (MPI 3.1,
// 8.7.1).
struct FinalizeHook {
  void (*function)(void*);
  void* value;
};

int RunAtFinalize(MPI_Comm, int, void* attribute, void*) {
  auto* hook = static_cast<FinalizeHook*>(attribute);
  const FinalizeHook run = *hook;
  delete hook;
  if (run.function != nullptr) run.function(run.value);
  return MPI_SUCCESS;
}

int AtFinalize(void (*function)(void*), void* value, int* key) {
  int code = MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, RunAtFinalize, key, nullptr);
  if (code != MPI_SUCCESS) return code;
  auto* const hook = new FinalizeHook{function, value};
  code = MPI_Comm_set_attr(MPI_COMM_SELF, *key, hook);
  if (code == MPI_SUCCESS) return code;
  delete hook;
  MPI_Comm_free_keyval(key);
  return code;
}

int CancelAtFinalize(int key) {
  void* attribute = nullptr;
  int is_there = 0;
  int code = MPI_Comm_get_attr(MPI_COMM_SELF, key, static_cast<void*>(&attribute), &is_there);
  if (code != MPI_SUCCESS || is_there == 0) return code;
  static_cast<FinalizeHook*>(attribute)->function = nullptr;
  code = MPI_Comm_delete_attr(MPI_COMM_SELF, key);
  return code == MPI_SUCCESS ? MPI_Comm_free_keyval(&key) : code;
}

Comm World() { return FromMpi(MPI_COMM_WORLD); }
#ifdef MPI_ABI_VERSION  // whose numbers are no longer Fortran's
Comm FromNumber(int handle) { return FromMpi(MPI_Comm_fromint(handle)); }
int ToNumber(Comm comm) { return MPI_Comm_toint(ToMpi(comm)); }
#else
Comm FromNumber(int handle) { return FromMpi(MPI_Comm_f2c(handle)); }
int ToNumber(Comm comm) { return MPI_Comm_c2f(ToMpi(comm)); }
#endif
int CommRank(Comm comm, int* rank) { return MPI_Comm_rank(ToMpi(comm), rank); }
int CommSize(Comm comm, int* size) { return MPI_Comm_size(ToMpi(comm), size); }
int CommTestInter(Comm comm, int* is) { return MPI_Comm_test_inter(ToMpi(comm), is); }

int CommIsCongruent(Comm a, Comm b, bool* is) {
  int same = MPI_UNEQUAL;
  const int code = MPI_Comm_compare(ToMpi(a), ToMpi(b), &same);
  *is = same == MPI_CONGRUENT;
  return code;
}

// The communicator is written when the request completes, in its place: a handle of 32 bits is the
// lower half there.
static_assert(std::is_pointer_v<MPI_Comm> || std::endian::native == std::endian::little);
int CommIdup(Comm comm, Comm* made, Request* request) {
  made->bits = 0;
  return ThroughRequest(request, [&](MPI_Request* mpi) {
    return MPI_Comm_idup(ToMpi(comm), reinterpret_cast<MPI_Comm*>(&made->bits), mpi);
  });
}

int CommCreateGroup(Comm comm, int count, int (*ranges)[3], int tag, Comm* made) {
  MPI_Group all = MPI_GROUP_NULL;
  MPI_Group some = MPI_GROUP_NULL;
  int code = MPI_Comm_group(ToMpi(comm), &all);
  if (code != MPI_SUCCESS) return code;
  code = MPI_Group_range_incl(all, count, ranges, &some);
  if (code == MPI_SUCCESS) {
    MPI_Comm mpi = MPI_COMM_NULL;
    code = MPI_Comm_create_group(ToMpi(comm), some, tag, &mpi);
    *made = FromMpi(mpi);
    MPI_Group_free(&some);
  }
  MPI_Group_free(&all);
  return code;
}

int CommFree(Comm* comm) {
  return Through<MPI_Comm>(comm, MPI_COMM_NULL, [](MPI_Comm* mpi) { return MPI_Comm_free(mpi); });
}

int ReturnErrors(Comm comm) { return MPI_Comm_set_errhandler(ToMpi(comm), MPI_ERRORS_RETURN); }

int TakeHandlerOfWorld(Comm comm) {
  MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
  int code = MPI_Comm_get_errhandler(MPI_COMM_WORLD, &handler);
  if (code != MPI_SUCCESS) return code;
  code = MPI_Comm_set_errhandler(ToMpi(comm), handler);
  MPI_Errhandler_free(&handler);
  return code;
}

int HighestTag(Comm comm, int* tag, bool* is_known) {
  int* highest = nullptr;
  int found = 0;
  const int code = MPI_Comm_get_attr(ToMpi(comm), MPI_TAG_UB, static_cast<void*>(&highest), &found);
  *is_known = code == MPI_SUCCESS && found != 0;
  if (*is_known) *tag = *highest;
  return code;
}

int Isend(const void* memory, int bytes, int to, int tag, Comm comm, Request* request) {
  return ThroughRequest(request, [&](MPI_Request* mpi) {
    return MPI_Isend(memory, bytes, MPI_BYTE, to, tag, ToMpi(comm), mpi);
  });
}

int Irecv(void* memory, int bytes, int from, int tag, Comm comm, Request* request) {
  return ThroughRequest(request, [&](MPI_Request* mpi) {
    return MPI_Irecv(memory, bytes, MPI_BYTE, from, tag, ToMpi(comm), mpi);
  });
}

int Take(const MPI_Status& status, Received* received) {
  int cancelled = 0;
  received->source = status.MPI_SOURCE;
  received->tag = status.MPI_TAG;
  received->error = status.MPI_ERROR;
  MPI_Test_cancelled(&status, &cancelled);
  received->cancelled = cancelled != 0;
  return MPI_Get_count(&status, MPI_BYTE, &received->bytes);
}

int Improbe(int tag, Comm comm, int* found, Message* message, Received* received) {
  MPI_Status status{};
  const int code = Through<MPI_Message>(message, MPI_MESSAGE_NULL, [&](MPI_Message* mpi) {
    return MPI_Improbe(MPI_ANY_SOURCE, tag, ToMpi(comm), found, mpi, &status);
  });
  return code == MPI_SUCCESS && *found != 0 ? Take(status, received) : code;
}

int Imrecv(void* memory, int bytes, Message* message, Request* request) {
  return ThroughRequest(request, [&](MPI_Request* mpi) {
    return Through<MPI_Message>(message, MPI_MESSAGE_NULL, [&](MPI_Message* of) {
      return MPI_Imrecv(memory, bytes, MPI_BYTE, of, mpi);
    });
  });
}

int Test(Request* request, int* done, Received* received) {
  return ThroughRequest(request, [&](MPI_Request* mpi) {
    if (received == nullptr) return MPI_Test(mpi, done, MPI_STATUS_IGNORE);
    MPI_Status status{};  // MPI_Test need not set its error
    const int code = MPI_Test(mpi, done, &status);
    return code == MPI_SUCCESS && *done != 0 ? Take(status, received) : code;
  });
}

int Cancel(Request* request) {
  return ThroughRequest(request, [](MPI_Request* mpi) { return MPI_Cancel(mpi); });
}

int IallgatherSizes(const std::uint64_t* mine, std::uint64_t* all, Comm comm, Request* request) {
  return ThroughRequest(request, [&](MPI_Request* mpi) {
    return MPI_Iallgather(mine, 1, MPI_UINT64_T, all, 1, MPI_UINT64_T, ToMpi(comm), mpi);
  });
}

int IallgathervBytes(const char* mine, int bytes, char* all, const int* counts,
                     const int* displacements, Comm comm, Request* request) {
  return ThroughRequest(request, [&](MPI_Request* mpi) {
    return MPI_Iallgatherv(mine, bytes, MPI_CHAR, all, counts, displacements, MPI_CHAR, ToMpi(comm),
                           mpi);
  });
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const sirtaki::mpi::Api* sirtaki_mpi_api() {
  static const Api api = {
      .version = Api::kVersion,
      .bytes = sizeof(Api),
      .GetLibraryVersion = GetLibraryVersion,
      .ErrorString = ErrorString,
      .GetProcessorName = GetProcessorName,
      .Initialized = MPI_Initialized,
      .Finalized = MPI_Finalized,
      .InitThread = InitThread,
      .QueryThread = QueryThread,
      .IsThreadMain = MPI_Is_thread_main,
      .Finalize = MPI_Finalize,
      .HasVariable = HasVariable,
      .AtFinalize = AtFinalize,
      .CancelAtFinalize = CancelAtFinalize,
      .World = World,
      .FromNumber = FromNumber,
      .ToNumber = ToNumber,
      .CommRank = CommRank,
      .CommSize = CommSize,
      .CommTestInter = CommTestInter,
      .CommIsCongruent = CommIsCongruent,
      .CommIdup = CommIdup,
      .CommCreateGroup = CommCreateGroup,
      .CommFree = CommFree,
      .ReturnErrors = ReturnErrors,
      .TakeHandlerOfWorld = TakeHandlerOfWorld,
      .HighestTag = HighestTag,
      .Isend = Isend,
      .Irecv = Irecv,
      .Improbe = Improbe,
      .Imrecv = Imrecv,
      .Test = Test,
      .Cancel = Cancel,
      .IallgatherSizes = IallgatherSizes,
      .IallgathervBytes = IallgathervBytes,
  };
  return &api;
}
