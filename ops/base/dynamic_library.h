// Shared libraries that are opened at run time: those of others, which a program may or may not
// have.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "core/base/status.h"

namespace sirtaki::ops {

// Where to look, in this order.
struct LibrarySearch {
  // The file's name begins with it: a copy that is in the process already is taken, whatever it is
  // called behind this ("libcudart-1a2b.so.12").
  std::string prefix;
  // The folders are searched for files whose name begins with `prefix`.
  std::vector<std::filesystem::path> folders;
  // The names are looked up as the dynamic linker finds them.
  std::vector<std::string> names;
  // What is loaded later finds its symbols.
  bool is_global = false;
};

// Whether a library whose name begins so is in the process.
bool IsLoaded(const std::string& prefix);

// Stays open for the life of the process: what it started may outlive whoever opened it. Cheap to
// copy.
class DynamicLibrary {
 public:
  // kUnsupported if there is none; the text says what was looked at.
  static core::Status Open(const LibrarySearch& search, DynamicLibrary* library);

  const std::string& path() const { return path_; }
  void* Find(const char* symbol) const;  // null if it has none

  // The function of this name; false and null if there is none.
  template <typename Function>
  bool Take(const char* symbol, Function* function) const {
    *function = reinterpret_cast<Function>(Find(symbol));
    return *function != nullptr;
  }

 private:
  void* handle_ = nullptr;
  std::string path_;
};

// Where a LibTorch that is in the process keeps the libraries of its vendor: its own folder, and
// those of the packages beside it. None without LibTorch.
std::vector<std::filesystem::path> FoldersBesideLibTorch();

}  // namespace sirtaki::ops
