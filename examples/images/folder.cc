#include "images/folder.h"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <filesystem>
#include <stdexcept>
#include <system_error>

namespace examples {
namespace {

namespace fs = std::filesystem;

std::vector<fs::directory_entry> sorted(const fs::path& folder) {
  std::error_code error;
  std::vector<fs::directory_entry> entries;
  for (fs::directory_iterator i(folder, error); !error && i != fs::directory_iterator();
       i.increment(error)) {
    if (i->path().filename().string().front() != '.') entries.push_back(*i);
  }
  if (error) throw std::runtime_error(folder.string() + ": cannot be read: " + error.message());
  std::sort(entries.begin(), entries.end());
  return entries;
}

bool is_image(const fs::directory_entry& file) {
  std::error_code error;
  if (!file.is_regular_file(error)) return false;  // nor a link to one
  std::string ending = file.path().extension().string();
  std::transform(ending.begin(), ending.end(), ending.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  return ending == ".ppm" || ending == ".jpg" || ending == ".jpeg" || ending == ".png";
}

}  // namespace

ImageFolder list_images(const std::string& folder) {
  ImageFolder images;
  std::error_code error;
  for (const fs::directory_entry& entry : sorted(folder)) {
    if (!entry.is_directory(error)) continue;
    const std::size_t before = images.files.size();
    for (const fs::directory_entry& file : sorted(entry.path())) {
      if (!is_image(file)) continue;
      images.files.emplace_back(file.path().string(), static_cast<int>(images.classes.size()));
    }
    if (images.files.size() == before) {
      throw std::runtime_error(entry.path().string() +
                               ": a class without images (.ppm, .jpg, .jpeg, .png)");
    }
    images.classes.push_back(entry.path().filename().string());
  }
  if (images.classes.empty()) {
    throw std::runtime_error(folder + ": has no folders; one for each class is meant");
  }
  return images;
}

}  // namespace examples
