// A folder of images with one folder a class.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace examples {

struct ImageFolder {
  std::vector<std::string> classes;                // the names of the folders, sorted
  std::vector<std::pair<std::string, int>> files;  // a path and its class, sorted
};

// Files count if their names end in .ppm, .jpg, .jpeg or .png, in either case, and do not begin
// with a dot. Throws std::runtime_error that names the folder: if there is none, if it has no
// classes, or if one of them is without images.
ImageFolder list_images(const std::string& folder);

}  // namespace examples
